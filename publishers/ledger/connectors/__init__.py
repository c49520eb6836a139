"""Blocks of KV connectors and shared stores, tied to the blocks that the ledger knows."""
