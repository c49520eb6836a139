"""Shared stores: the notices that engines' publishers send about a store, and the publisher of the store itself.

    engine's ledger -> writes -> notice --NATS--> receiver -> the store's ledger -> publisher

A store outlives its writers, and several may write one chain. So a store has its own publisher, which makes it a holder, like
a worker. A lost notice only means that less is published than the store holds; blocks that would stay published too long end
with their time to live.
"""
