"""Faults of clusters: Valkey servers that share the store's slots, NATS servers that share the stream."""
