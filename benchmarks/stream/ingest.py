"""Throughput from events to index: of an indexer process that reads a full stream (its own limit), and of a publisher process,
NATS (file storage), the indexer and the store together, which share this machine's cores."""

from collections.abc import Sequence
from time import perf_counter

import anyio

from benchmarks.child_processes import indexer_process
from benchmarks.result import Result
from benchmarks.stream.synthetic_publisher import publisher_process, worker_names
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

RUNS = ((1, 150_000), (16, 60_000), (64, 20_000))
BUDGET = {1: 100_000, 16: 600_000, 64: 800_000}  # messages/s at 1, blocks/s at 16 and 64
DEADLINE_S = 60
POLL_S = 0.01


async def measure(store: Store, nats_url: str) -> list[Result]:
    results = []
    for hashes_a_message, messages in RUNS:
        index = await prepare_index(store, nats_url)
        async with publisher_process(nats_url, hashes_a_message, messages) as publisher:
            await publisher.start()
            await publisher.results()
        async with indexer_process(nats_url, store.url):
            rate = await measure_rate(index, worker_names(hashes_a_message), messages, count_from_first=True)
        results.append(_result("stream to index", hashes_a_message, rate, BUDGET[hashes_a_message]))
    for hashes_a_message, messages in RUNS:
        index = await prepare_index(store, nats_url)
        async with (
            indexer_process(nats_url, store.url),
            publisher_process(nats_url, hashes_a_message, messages // 2) as publisher,
        ):
            await publisher.start()
            rate = await measure_rate(index, worker_names(hashes_a_message), messages // 2, count_from_first=False)
        results.append(_result("publisher to index on the same cores", hashes_a_message, rate, None))
    return results


async def prepare_index(store: Store, nats_url: str) -> ResidencyIndex:
    """Prepare an empty index with every position at the stream's end, so an indexer reads only what is published from now
    on."""
    await store.client.flushall()
    index = await open_redis_index(store, writer=True)
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    await ensure_stream(client, StreamSettings())
    stream = await stream_info(client)
    for partition in range(index.partitions):
        await index.set_position(partition, None, Position(stream.creation_us, stream.last_seq))
    await client.close()
    return index


async def measure_rate(
    index: ResidencyIndex, workers: Sequence[str], messages: int, *, count_from_first: bool
) -> float:
    """Messages applied per second, from now or from the first applied message on."""
    first = 0
    began = perf_counter()
    with anyio.fail_after(DEADLINE_S):
        while True:
            applied = await _count_applied(index, workers)
            if count_from_first and not first and applied:
                first, began = applied, perf_counter()
            if applied >= messages:
                return (messages - first) / (perf_counter() - began)
            await anyio.sleep(POLL_S)


async def _count_applied(index: ResidencyIndex, workers: Sequence[str]) -> int:
    """The number of applied messages, without snapshots."""
    return sum(record.seq for record in await index.records(0) if record.worker_id in workers and record.seq > 0)


def _result(what: str, hashes_a_message: int, rate: float, budget: float | None) -> Result:
    name = f"{what}, {hashes_a_message} {'hash' if hashes_a_message == 1 else 'hashes'} a message"
    if hashes_a_message == 1:
        return Result(name, rate, "messages/s", budget, at_least=True)
    return Result(name, rate * hashes_a_message, "blocks/s", budget, at_least=True)
