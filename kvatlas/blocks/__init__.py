"""What a block is: its hash chain, its tiers, who holds it, and how much of it an engine reuses. Pure."""
