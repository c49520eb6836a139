"""Reads one partition of the stream."""
