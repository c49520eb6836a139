"""Background work in the store: scrub, sweep, expiry of records and scopes."""
