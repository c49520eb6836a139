"""Fleet records: the description, state and load of a worker, and where these are stored."""
