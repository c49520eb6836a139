"""Events to index, end to end: publisher process -> NATS (file storage) -> indexer process -> store, all on this machine."""

import asyncio
from time import perf_counter

from benchmarks.children import telling_process
from benchmarks.result import Result
from benchmarks.telling import worker_names
from kvatlas.index.redis import open_redis_index
from kvatlas.store import Store

RUNS = ((1, 120_000), (16, 60_000), (64, 18_000))
BUDGET = {1: 100_000, 16: 600_000, 64: 800_000}  # messages/s at 1, blocks/s at 16 and 64
DEADLINE_S = 60


async def measure(store: Store, nats_url: str) -> list[Result]:
    index = await open_redis_index(store, writer=False)
    results = []
    for hashes_a_message, messages in RUNS:
        workers = worker_names(hashes_a_message)
        async with telling_process(nats_url, hashes_a_message, messages) as process:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            began = perf_counter()
            async with asyncio.timeout(DEADLINE_S):
                while await _applied(store, index.shards, workers) < messages:
                    await asyncio.sleep(0.01)
            seconds = perf_counter() - began
        unit = "messages/s" if hashes_a_message == 1 else "blocks/s"
        name = f"events to index at {hashes_a_message} hashes a message"
        rate = messages * hashes_a_message / seconds
        results.append(Result(name, rate, unit, BUDGET[hashes_a_message], at_least=True))
    return results


async def _applied(store: Store, shards: int, workers: list[str]) -> int:
    """Messages behind the snapshot that the index has applied."""
    index = await open_redis_index(store, writer=False)
    records = [record for shard in range(shards) for record in await index.records(shard)]
    return sum(record.seq for record in records if record.worker_id in workers and record.seq > 0)
