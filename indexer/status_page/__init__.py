"""The HTTP server of a replica: a page for people, `/status` for scripts, and endpoints for probes."""
