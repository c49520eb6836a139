"""Background work in the store: scrubbing, sweeping, and the expiry of records, scopes and function libraries."""
