"""Background work in the store: sweep, expiry of records, scopes and function libraries."""
