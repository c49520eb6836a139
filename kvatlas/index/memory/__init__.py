"""The residency index in process memory: the reference model."""
