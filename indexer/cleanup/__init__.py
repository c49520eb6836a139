"""Work in the background: scrub, sweep, expiry."""
