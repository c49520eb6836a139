"""Indexer workers: fold the stream of publishers' messages into the residency index.

Any number of identical replicas; each partition is read by the one that holds its lease. Leases only save work: what
protects is the fence inside the index (see `kvatlas.index.protocol`).
"""
