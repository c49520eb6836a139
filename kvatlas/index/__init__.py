"""The residency index: one protocol, two implementations (memory, redis)."""
