"""Resolves the hashes that engines send to blocks."""
