"""The cost of a request on each worker."""
