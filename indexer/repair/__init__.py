"""Doubt about a worker, and the snapshot that ends it."""
