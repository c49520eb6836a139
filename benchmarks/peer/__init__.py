"""Compares kvatlas with NVIDIA Dynamo 1.6.1 on the same work: `make bench-peer`.

The peer is what `ai-dynamo-runtime` ships, run as its documentation says, with its defaults, without etcd and NATS (none of
these parts needs them):

- `SelectionService` (in process): worker selection with reservations, over its own index.
- `python -m dynamo.indexer`: a process that follows engines over ZMQ and answers overlaps over HTTP.
- `RadixTree` (in process): only its index.

Ours is what a fleet runs: sidecar, NATS, indexer and store as processes, a router client in the router's process.

These differences are not compensated for: kvatlas' index is shared by all routers, outlives its processes, detects losses, and
separates tenants and adapters in the key; its reservations are visible to all routers at once. The peer's index and
reservations live in one process' memory; there is no bus, no acknowledgement, no digest. Its selection weighs overlap and
active load; ours also prices rates, queues, transfers and predictions.

Each subject runs in its own processes. Turns alternate; figures are medians of the turns, and a ratio is the median of the
turns' ratios, because other work on the machine affects both. The peer's two HTTP services listen on all interfaces while they
run (they have no setting for that).
"""
