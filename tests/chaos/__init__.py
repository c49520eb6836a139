"""Injects faults into a running fleet of real processes, waits until the index is exact again, and reports how long that
took."""
