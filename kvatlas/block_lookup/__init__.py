"""Looks up single blocks by any of their names. For tools and interactive use; never called while a request is being served."""
