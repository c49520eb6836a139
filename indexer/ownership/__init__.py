"""Decides which replica owns which partition: membership, leases, rendezvous hashing, and the running readers."""
