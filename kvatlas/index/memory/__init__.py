"""The residency index in process: the reference model."""
