"""The fleet in the store: records of workers, members, leases."""
