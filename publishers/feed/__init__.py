"""Reads engine batches from an engine's sockets without gaps."""
