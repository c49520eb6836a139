"""The residency index: one protocol and three implementations (memory, Redis, SQLite)."""
