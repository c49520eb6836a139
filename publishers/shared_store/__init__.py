"""Shared stores: what the publishers of engines tell of one, and the publisher of the store itself.

    engine's ledger -> writes -> notice --NATS--> receiver -> the store's ledger -> publisher

A store outlives its writers, and a chain in it may have several: so it has a publisher of its own, under which it is a holder
as a worker is one. What notices lose is less than the store holds; what they would keep too long ends with its time to live.
"""
