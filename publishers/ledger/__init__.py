"""The ledger of one engine's blocks, and the changes that are published."""
