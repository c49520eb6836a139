"""Faults into a running fleet of real processes, until the index is exact again; what that took is reported."""
