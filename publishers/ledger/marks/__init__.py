"""The positions at which hybrid models can resume a prompt: the blocks held by groups other than full attention, the marks,
and their events."""
