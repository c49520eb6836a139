"""Which workers live."""
