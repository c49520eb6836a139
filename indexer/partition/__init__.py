"""Reads a partition of the stream: reader, pull consumer, admission, queue and dead letters."""
