"""The residency index in one process and a file: it answers from memory, and starts again with the content that it had last."""
