"""Where hybrid models resume a prompt: which blocks the groups besides full attention hold, the marks, and their events."""
