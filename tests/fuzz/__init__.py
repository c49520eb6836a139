"""A fuzzer of running processes: see `__main__`."""
