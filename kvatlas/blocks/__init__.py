"""Blocks: their hash chain, their tiers, who holds them, and how much of them an engine reuses. All of it is pure code."""
