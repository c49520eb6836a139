"""The peer: starting its processes, and what runs in its own Python."""
