"""LMCache's events over its gRPC transport (extra `lmcache`). `kv_events_pb2` is generated from `kv_events.proto`."""
