"""A router's replica of the index compared with the shared one: `python -m benchmarks.index.replica`.

In alternating turns, it measures overlaps and booked choices on both. Then it measures the cost of the replica: of the
copy (time, memory, the longest time that other tasks of the process waited), and of each message and block of the
stream.
"""

import asyncio
import gc
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter, process_time

import uvloop
from nats.aio.client import Client
from rich.console import Console

from benchmarks.index.overlap import SCOPE, USE
from benchmarks.process_usage import usage_of
from benchmarks.result import Result, tabulate
from benchmarks.route.workload import BLOCKS as ROUTE_BLOCKS
from benchmarks.route.workload import WORKERS as ROUTE_WORKERS
from benchmarks.route.workload import RouteWorkload
from benchmarks.stores import valkey_store
from benchmarks.stream.synthetic_publisher import publisher_process
from benchmarks.timing import quantile
from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.admission import Admission
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.embedded import nats_server
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.local_copy.counters import ReplicaCounters
from kvatlas.index.local_copy.local_copy import IndexReplica, ReplicaState, open_replica
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.local_copy.store_copy import copy_shard
from kvatlas.index.local_copy.stream_feed import StreamFeed
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.answering_index import AnsweringIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import Store
from router_client import RouterClient, RouterSettings

LENGTHS = (512, 2_048, 8_192)
HOLDERS = 64
TURNS, CALLS = 4, 50
COPIED_BLOCKS = 1 << 17
COPIED_HOLDERS = 4
MESSAGES = {1: 6_000, 16: 6_000, 64: 3_000}


@asynccontextmanager
async def _ready_replica(store: Store, nats_url: str) -> AsyncIterator[tuple[RedisIndex, IndexReplica]]:
    index = await open_redis_index(store, writer=True)
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    await ensure_stream(client, StreamSettings(storage="memory"))
    await client.close()
    # the process' other requests share its core, and delay this reading
    async with open_replica(
        store, AnsweringIndex(store, index), ReplicaSettings(nats_url, max_stale_ms=5_000)
    ) as replica:
        while replica.state is not ReplicaState.CURRENT:
            await asyncio.sleep(0.01)
        yield index, replica


async def measure_overlaps(store: Store, nats_url: str) -> list[Result]:
    await store.client.flushall()
    index = await open_redis_index(store, writer=True)
    chains = {}
    for number, blocks in enumerate(LENGTHS):
        chains[blocks] = extend_chain(range(number * 200_000, number * 200_000 + blocks * 16), 16)
        order = list(range(1, HOLDERS + 1))
        random.Random(HOLDERS).shuffle(order)
        for worker, rank in enumerate(order):
            await index.put(USE, f"holder-{worker}", Tier.HBM, chains[blocks][: 8 * max(1, blocks * rank // HOLDERS)])
    results = []
    async with _ready_replica(store, nats_url) as (shared, replica):
        for blocks, chain in chains.items():
            calls = {
                "replica": partial(replica.overlap, SCOPE, chain),
                "shared": partial(shared.overlap, SCOPE, chain),
            }
            for name, times in (await _in_turns(calls)).items():
                for q in (0.5, 0.99):
                    what = f"overlap, {blocks:,} blocks, {HOLDERS} holders of different depth, {name}, p{q * 100:g}"
                    results.append(Result(what, quantile(times, q) * 1e6, "us"))
        assert not replica.counters.while_stale, "the store answered for the replica"
    return results


async def measure_choices(store: Store, nats_url: str) -> list[Result]:
    """Measure choices. Each turn's CPU time is this process' own; the store's is separate."""
    workload = RouteWorkload(ROUTE_WORKERS, ROUTE_BLOCKS)
    await workload.write(store)
    results = []
    async with _ready_replica(store, nats_url) as (shared, replica):
        shared_client, replica_client = (
            RouterClient(
                index, FleetStore(store), RouterSettings(deadline_ms=None), reservations=RedisReservations(store)
            )
            for index in (shared, replica)
        )
        cpu: dict[str, float] = {"replica": 0.0, "shared": 0.0}

        async def choose(name: str, client: RouterClient) -> None:
            began = process_time()
            choice = await client.reserve(workload.hashed_prompt())
            cpu[name] += process_time() - began
            await choice.done()

        async with shared_client, replica_client:
            calls = {
                "replica": partial(choose, "replica", replica_client),
                "shared": partial(choose, "shared", shared_client),
            }
            for name, times in (await _in_turns(calls)).items():
                what = f"choose and book, {ROUTE_WORKERS} workers, {ROUTE_BLOCKS} blocks, {name}"
                results += [Result(f"{what}, p{q * 100:g}", quantile(times, q) * 1e6, "us") for q in (0.5, 0.99)]
                results.append(Result(f"{what}, CPU time of the router", cpu[name] / len(times) * 1e6, "us"))
    return results


async def measure_copy(store: Store) -> list[Result]:
    await store.client.execute_command("FLUSHALL", "SYNC")
    index = await open_redis_index(store, writer=True)
    hashes = os.urandom(8 * COPIED_BLOCKS)
    for holder in range(COPIED_HOLDERS):
        await index.put(USE, f"holder-{holder}", Tier.HBM, hashes)
    del hashes
    gc.collect()
    before, copy = usage_of(os.getpid()).rss_bytes, MemoryIndex(side_index=False)
    async with _longest_wait() as longest:
        began, cpu_s = perf_counter(), process_time()
        await copy_shard(ShardReader(store, ShardKeys(0)), copy.shard_at(0), lambda _: None)
        took_s, cpu_s = perf_counter() - began, process_time() - cpu_s
    grown = usage_of(os.getpid()).rss_bytes - before
    what = f"copy of {COPIED_BLOCKS:,} blocks, {COPIED_HOLDERS} holders"
    return [
        Result(f"{what}, time", took_s, "s"),
        Result(f"{what}, CPU time a block", cpu_s / COPIED_BLOCKS * 1e6, "us"),
        Result(f"{what}, memory a block", grown / COPIED_BLOCKS, "bytes", 160),
        Result(f"{what}, longest wait of another task", longest() * 1e3, "ms"),
    ]


async def measure_feed(nats_url: str) -> list[Result]:
    """Measure the reading of a stream that is full from the start."""
    results = []
    for hashes, messages in MESSAGES.items():
        client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
        start = await _end_of(client)
        async with publisher_process(nats_url, hashes, messages) as publisher:
            await publisher.start()
            await publisher.results()
        counters = ReplicaCounters()
        copy = MemoryIndex(side_index=False)
        feed = StreamFeed(client, copy, Admission(None, copy.partitions), start, counters, probe_s=0.05)
        began, cpu_s = perf_counter(), process_time()
        async with _longest_wait() as longest:
            task = asyncio.create_task(feed.run())
            while feed.current_s == float("-inf"):
                await asyncio.sleep(0.01)
            took_s, cpu_s = perf_counter() - began, process_time() - cpu_s
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert counters.messages_read >= messages
        await client.close()
        what = f"feed, {hashes} {'block' if hashes == 1 else 'blocks'} a message"
        results += [
            Result(f"{what}, CPU time a message", cpu_s / messages * 1e6, "us"),
            Result(f"{what}, CPU time a block", cpu_s / messages / hashes * 1e6, "us"),
            Result(f"{what}, most", messages / took_s, "messages/s"),
            Result(f"{what}, longest wait of another task", longest() * 1e3, "ms"),
        ]
    return results


async def _end_of(client: Client) -> Position:
    await ensure_stream(client, StreamSettings(storage="memory"))
    stream = await stream_info(client)
    return Position(stream.creation_us, stream.last_seq)


async def _in_turns(calls: Mapping[str, Callable[[], Awaitable[object]]]) -> dict[str, list[float]]:
    """The sorted durations of each, in seconds, from alternating turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            for _ in range(CALLS):
                began = perf_counter()
                await call()
                times[name].append(perf_counter() - began)
    return {name: sorted(one) for name, one in times.items()}


@asynccontextmanager
async def _longest_wait() -> AsyncIterator[Callable[[], float]]:
    """Yields the longest time (s) that an always-ready task waited for its turn."""
    longest = 0.0

    async def run() -> None:
        nonlocal longest
        while True:
            began = perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, perf_counter() - began - 0.001)

    task = asyncio.create_task(run())
    try:
        yield lambda: longest
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _report() -> None:
    console = Console(width=130)
    async with nats_server() as nats, valkey_store() as store:
        console.print(tabulate(await measure_copy(store), "a copy of the index"))
        console.print(tabulate(await measure_overlaps(store, nats.url), "overlaps"))
        console.print(tabulate(await measure_choices(store, nats.url), "choices"))
        console.print(tabulate(await measure_feed(nats.url), "the stream"))


def main() -> None:
    uvloop.run(_report())


if __name__ == "__main__":
    main()
