"""From the hashes that engines send to the blocks that they stand for."""
