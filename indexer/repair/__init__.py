"""Doubts about a worker's blocks, and the snapshots that resolve them."""
