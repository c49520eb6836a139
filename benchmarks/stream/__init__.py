"""Throughput from the publisher through the stream into the index."""
