"""The residency index in the memory of a process: the reference model."""
