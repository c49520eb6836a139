"""Measures how long an index of 1,048,576 blocks takes to be complete again after FLUSHALL.

It uses real servers, two indexers, and the publishers of a fleet in one process. The index is complete when every worker
answers with all its blocks. Grants for snapshots are observed on the bus, to count the bytes outstanding at the same time.
"""

from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter

import anyio
from nats.aio.client import Client

from benchmarks.child_processes import child_process, indexer_process
from benchmarks.rebuild.fleet import worker_name
from benchmarks.rebuild.grant_monitor import GrantMonitor
from benchmarks.result import Result
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import STREAM
from kvatlas.errors import LayoutMismatch
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import Store

WORKERS = 16
BLOCKS = 1 << 20
INDEXERS = 2
ROUNDS = 3
SETTLE_S = 3.0
"""Pause before each round, until no worker is in doubt."""
LONGEST_S = 10.0
POLL_S = 0.05
DEADLINE_S = 120.0
FILL_S = 120.0


async def measure(store: Store, nats_url: str, *, workers: int = WORKERS, rounds: int = 1) -> list[Result]:
    await store.client.flushall()
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        for _ in range(INDEXERS):
            await stack.enter_async_context(indexer_process(nats_url, store.url))
        args = [nats_url, str(workers), str(BLOCKS // workers)]
        await stack.enter_async_context(child_process("benchmarks.rebuild.fleet", args, ready_s=FILL_S))
        names = [worker_name(number) for number in range(workers)]
        await _wait_until_complete(store, names)
        grants = GrantMonitor()
        await grants.listen(client)
        durations, firsts, sent = [], [], []
        for _ in range(rounds):
            await anyio.sleep(SETTLE_S)
            before = await _stream_bytes(client)
            began = perf_counter()
            await store.client.flushall()
            first_s = await _wait_until_complete(store, names, grants)
            durations.append(perf_counter() - began)
            firsts.append(first_s)
            sent.append(await _stream_bytes(client) - before)
    return [
        Result(f"rebuild of {BLOCKS:,} blocks of {workers} workers after FLUSHALL", median(durations), "s", LONGEST_S),
        *([Result("  the slowest", max(durations), "s")] if rounds > 1 else []),
        Result("  until the first worker answers again", median(firsts), "s"),
        Result("  bytes sent through the stream", median(sent) / 2**20, "MiB"),
        Result("  snapshot bytes granted and outstanding, at most", grants.peak_bytes / 2**20, "MiB"),
        Result("  snapshots granted", grants.granted / rounds, "a round"),
        Result("  snapshots refused for now", grants.refused / rounds, "a round"),
    ]


async def _wait_until_complete(store: Store, names: list[str], grants: GrantMonitor | None = None) -> float:
    """Wait until every worker answers with all its blocks. Returns after how many seconds the first one answered."""
    began, first_s = perf_counter(), 0.0
    index: RedisIndex | None = None
    with anyio.fail_after(DEADLINE_S):
        while True:
            await anyio.sleep(POLL_S)
            try:
                index = index or await open_redis_index(store, writer=False)
            except LayoutMismatch:  # the indexers have not yet written the layout again
                continue
            records = {record.worker_id: record for record in await index.records(0)}
            if grants is not None:
                grants.complete(records)
            answering = [name for name in names if name in records and records[name].answering]
            if answering and not first_s:
                first_s = perf_counter() - began
            if len(answering) == len(names) and (await index.metrics()).resident_blocks == BLOCKS:
                return first_s


async def _stream_bytes(client: Client) -> int:
    return (await client.jetstream().stream_info(STREAM)).state.bytes
