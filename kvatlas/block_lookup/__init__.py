"""Single blocks by whatever name a caller has: for people and tools, on no request's path."""
