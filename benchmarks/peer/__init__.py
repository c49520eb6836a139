"""Compares kvatlas with NVIDIA Dynamo 1.6.1 on the same work: `make bench-peer`.

The peer is what `ai-dynamo-runtime` ships, run as its documentation says, with its defaults and without etcd or NATS (none of
these parts needs them):

- `SelectionService` (in process): worker selection with reservations, over its own index.
- `python -m dynamo.indexer`: a process that follows engines over ZMQ and answers overlap queries over HTTP.
- `RadixTree` (in process): only its index.

Ours is what a fleet runs: sidecar, NATS, indexer and store as processes, and a router client in the router's process.

The figures are not adjusted for these differences: kvatlas' index is shared by all routers, outlives its processes, detects
losses, and separates tenants and adapters in the key; its reservations are visible to all routers at once. The peer's index and
reservations live in one process' memory; there is no bus, no acknowledgement, no digest. Its selection weighs overlap and
active load; ours also prices rates, queues, transfers and predictions.

Each subject runs in its own processes. Turns alternate; figures are medians of the turns, and a ratio is the median of the
turns' ratios, because other work on the machine affects both subjects. The peer's two HTTP services listen on all interfaces
while they run (they have no setting for that).
"""
