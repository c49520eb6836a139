"""Background work in the store: scrub, sweep, expiry of records, scopes and function libraries."""
