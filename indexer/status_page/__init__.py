"""The HTTP server of a replica: a human-readable page, `/status` for scripts, and endpoints for probes."""
