"""The residency index in one process and a file: answers from memory, and restarts with what it held."""
