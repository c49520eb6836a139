"""kvatlas beside NVIDIA Dynamo 1.6.1, on the same work: `make bench-peer`.

The peer is what `ai-dynamo-runtime` ships, run as its documentation says, with its defaults, without etcd and NATS (none of
these parts needs them):

- `SelectionService` (in process): worker selection with reservations, over an index of its own.
- `python -m dynamo.indexer`: a process that follows engines over ZMQ and answers overlaps over HTTP.
- `RadixTree` (in process): its index alone.

Ours is what a fleet runs: sidecar, NATS, indexer and store as processes, a router client in the router's process.

What differs, and is not evened out: kvatlas' index is shared by all routers, outlives its processes, knows what it lost,
and keeps tenants and adapters apart in the key; its reservations are seen by all routers at once. The peer's index and
reservations live in one process' memory; there is no bus, no acknowledgement, no digest. Its selection weighs overlap and
active load; ours prices rates, queues, transfers and predictions too.

Each subject runs in processes of its own. Turns alternate; figures are medians of the turns, a ratio is the median of the
turns' ratios: other work on the machine moves both. The peer's two HTTP services listen on all interfaces while they run
(they have no setting for that).
"""
