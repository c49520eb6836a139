"""Decides which replica owns which partition: membership, leases, rendezvous hashing, the running readers."""
