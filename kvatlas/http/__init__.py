"""The HTTP server of every process: who may call what, how much a client may use, and what a refusal looks like."""
