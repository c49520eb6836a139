"""From an engine's ZMQ sockets to engine batches without a gap."""
