"""Looks up single blocks by any of their names, for tools and interactive use; never on a request's path."""
