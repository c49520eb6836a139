"""Doubt about a worker's blocks, and the snapshot that resolves it."""
