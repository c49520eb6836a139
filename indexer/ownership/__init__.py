"""Which replica owns which partition."""
