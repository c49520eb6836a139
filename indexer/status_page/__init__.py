"""A replica's HTTP server: a human-readable page, `/status` for scripts, and endpoints for probes."""
