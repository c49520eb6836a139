"""From published to visible: how long until a router finds a block, while the stream carries 5,000 messages a second.

A probe worker publishes one new block at a time and looks it up in the index until it is there; another process publishes
the rest of the load.
"""

import asyncio
import os
from time import perf_counter, time_ns

from benchmarks.result import Result
from benchmarks.stream.synthetic_publisher import publisher_process
from benchmarks.timing import quantile
from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import events_subject
from kvatlas.events import Message, ScopeUse, SnapshotBegin, SnapshotEnd, Stored
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

RATE = 5_000
SECONDS = 6
PROBES = 400
WORKER = "probe"
USE = ScopeUse(Scope("bench", "bench"), 16)


async def measure(store: Store, nats_url: str) -> list[Result]:
    index = await open_redis_index(store, writer=False)
    client = await connect_nats(nats_url, name="kvatlas-probe", wait=False)
    subject, incarnation = events_subject(WORKER, index.partitions), time_ns()
    scope_id, uses = USE.scope.scope_id, {USE.scope.scope_id: USE}
    begin = Message(WORKER, incarnation, 0, [SnapshotBegin(), SnapshotEnd(0, Digest().words)])
    await client.publish(subject, wire.encode(begin))
    times: list[float] = []
    async with publisher_process(nats_url, 4, RATE * SECONDS, RATE) as publisher:
        await publisher.start()
        await asyncio.sleep(0.5)
        for seq in range(1, PROBES + 1):
            block = os.urandom(8)
            payload = wire.encode(
                Message(WORKER, incarnation, seq, [Stored(scope_id, Tier.HBM, block)], uses, time_ns() // 1000)
            )
            began = perf_counter()
            await client.publish(subject, payload)
            await client._flush_pending()  # otherwise the client flushes in the event loop's next turn
            async with asyncio.timeout(10):
                while not (await index.overlap(USE.scope, block)).depths():
                    pass
            times.append(perf_counter() - began)
            await asyncio.sleep(0.005)
    await client.close()
    times.sort()
    return [
        Result("published to visible at 5,000 messages/s, p50", quantile(times, 0.5) * 1e3, "ms", 1.0),
        Result("published to visible at 5,000 messages/s, p99", quantile(times, 0.99) * 1e3, "ms", 10.0),
    ]
