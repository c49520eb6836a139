"""Fleet records: a worker's description, state and load, and where they are stored."""
