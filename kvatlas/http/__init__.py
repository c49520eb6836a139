"""The HTTP server of every process: who may call what, how much a client may take, and the form of a refusal."""
