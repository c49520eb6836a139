"""The index alone: overlap, memory per block, and the cost of digests."""
