"""The residency index: one protocol, three implementations (memory, Redis, SQLite)."""
