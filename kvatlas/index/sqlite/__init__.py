"""The residency index in one process and a file: it answers from memory, and restarts with its last content."""
