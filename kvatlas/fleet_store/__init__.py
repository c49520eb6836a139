"""The fleet in the store: worker records, members and leases."""
