"""Ingest, overlap and choices on 1, 2 and 3 primaries and with 1, 2 and 4 indexers: CPU time per block and per choice.

One primary is a standalone server with one shard. Two and three are the primaries that hold shards in a cluster of three: two
shards, or four, whose slots they get in turn. All share this machine's cores, so blocks per second mean little; each process'
CPU time shows what scales.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from time import process_time

import anyio
from redis.crc import key_slot
from rich.table import Table

from benchmarks.child_processes import server_process
from benchmarks.route.workload import SCOPE, RouteWorkload
from benchmarks.scaling.processor_time import Stretch
from benchmarks.stream.synthetic_publisher import publisher_process, worker_names
from benchmarks.timing import quantile, time_async_calls
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store, connected_store
from router_client import RouterClient, RouterSettings
from tests.valkey_cluster import ClusterProcesses, EmbeddedCluster

PRIMARIES = {1: 1, 2: 2, 3: 4}
"""The number of shards (a divisor of 64), by the number of primaries that hold them."""
INDEXERS = (1, 2, 4)
HASHES, MESSAGES = 16, 6_000
CHOICES, OVERLAPS = 200, 200
WARM_UP = 20
WORKERS, BLOCKS = 64, 512
DEADLINE_S = 120
POLL_S = 0.05


@dataclass(slots=True)
class Figures:
    """CPU time in microseconds: of a choice and an overlap, by process; of a block, by number of indexers. And blocks per
    second."""

    primaries: int
    choice_us: dict[str, float] = field(default_factory=dict)
    overlap_us: dict[str, float] = field(default_factory=dict)
    overlap_p50_ms: float = 0.0
    block_us: dict[int, dict[str, float]] = field(default_factory=dict)
    rate: dict[int, float] = field(default_factory=dict)


@asynccontextmanager
async def running_store(primaries: int, shards: int) -> AsyncIterator[tuple[Store, dict[str, int]]]:
    """Start an empty store; yields it and its processes by name."""
    async with AsyncExitStack() as stack:
        if primaries == 1:
            server = await stack.enter_async_context(valkey_server())
            url, pids = server.url, {"store": server.pid}
        else:
            processes = ClusterProcesses()
            cluster = await stack.enter_async_context(EmbeddedCluster(processes))
            url = cluster.url
            for shard in range(shards):
                _move_slot(processes, key_slot(ShardKeys(shard).meta.encode()), shard % primaries)
            pids = {f"store {number}": node.pid for number, node in enumerate(cluster.nodes, 1)}
        yield await stack.enter_async_context(connected_store(url, wait=False)), pids


def _move_slot(cluster: ClusterProcesses, slot: int, primary: int) -> None:
    """Give an empty slot to a primary."""
    owner = cluster.nodes[primary].command("CLUSTER MYID")
    for node in (cluster.nodes[primary], *cluster.nodes):  # the new owner first
        node.command("CLUSTER SETSLOT", slot, "NODE", owner)


async def measure(primaries: int) -> Figures:
    figures = Figures(primaries)
    shards = PRIMARIES[primaries]
    async with running_store(primaries, shards) as (store, pids), nats_server() as nats:
        await _measure_choices(figures, store, pids, shards)
        for indexers in INDEXERS:
            await store.client.flushall()
            async with AsyncExitStack() as stack:
                arguments = ["indexer", "--nats-url", nats.url, "--redis-url", store.url, "--shards", str(shards)]
                processes = [
                    await stack.enter_async_context(server_process("kvatlas_cli.main", arguments, "(is ready)"))
                    for _ in range(indexers)
                ]
                names = {f"indexer {number}": process.pid for number, process in enumerate(processes, 1)}
                publisher = await stack.enter_async_context(publisher_process(nats.url, HASHES, MESSAGES))
                index = await open_redis_index(store, writer=False)
                stretch = Stretch({**pids, **names, "NATS": nats.pid})
                await publisher.start()
                await _wait_until_applied(index)
                blocks = HASHES * MESSAGES
                figures.rate[indexers] = blocks / stretch.seconds
                figures.block_us[indexers] = {name: cpu / blocks * 1e6 for name, cpu in stretch.cpu_s().items()}
    return figures


async def _measure_choices(figures: Figures, store: Store, pids: dict[str, int], shards: int) -> None:
    workload = RouteWorkload(WORKERS, BLOCKS)
    await workload.write(store, shards=shards)
    async with RouterClient.open(store.url, RouterSettings(deadline_ms=None), wait=False) as router:

        async def choose() -> None:
            await (await router.reserve(workload.hashed_prompt())).done()

        for _ in range(WARM_UP):
            await choose()
        stretch, own = Stretch(pids), process_time()
        for _ in range(CHOICES):
            await choose()
        figures.choice_us = {name: cpu / CHOICES * 1e6 for name, cpu in stretch.cpu_s().items()}
        figures.choice_us["router"] = (process_time() - own) / CHOICES * 1e6
    index = await open_redis_index(store, writer=False)
    stretch, own = Stretch(pids), process_time()
    times = await time_async_calls([partial(index.overlap, SCOPE, workload.hashes()) for _ in range(OVERLAPS)])
    figures.overlap_us = {name: cpu / OVERLAPS * 1e6 for name, cpu in stretch.cpu_s().items()}
    figures.overlap_us["router"] = (process_time() - own) / OVERLAPS * 1e6
    figures.overlap_p50_ms = quantile(times, 0.5) * 1e3


async def _wait_until_applied(index: RedisIndex) -> None:
    names = set(worker_names(HASHES))
    with anyio.fail_after(DEADLINE_S):
        while True:
            records = [record for shard in range(index.shards) for record in await index.records(shard)]
            if sum(record.seq for record in records if record.worker_id in names and record.seq > 0) >= MESSAGES:
                return
            await anyio.sleep(POLL_S)


def _sum_of(figures: dict[str, float], prefix: str) -> tuple[float, float]:
    """(the sum over all processes whose name starts with `prefix`, the value of the busiest one)."""
    found = [figure for name, figure in figures.items() if name.startswith(prefix)] or [0.0]
    return sum(found), max(found)


async def report() -> list[Table]:
    all_figures = [await measure(primaries) for primaries in PRIMARIES]
    ingest = Table(
        *("primaries", "indexers", "blocks/s", "store, us a block", "of it the busiest primary"),
        *("indexers", "of it the busiest", "NATS", "together"),
        title=f"ingest, {HASHES} blocks a message, {os.cpu_count()} cores for all",
    )
    choices = Table(
        *("primaries", "a choice: router, us", "store", "of it the busiest primary"),
        *("an overlap: router, us", "store", "of it the busiest primary", "p50, ms"),
        title=f"choices and overlaps, {WORKERS} workers, {BLOCKS} blocks",
    )
    for figures in all_figures:
        for indexers, by_process in figures.block_us.items():
            store, busiest = _sum_of(by_process, "store")
            of_indexers, busiest_indexer = _sum_of(by_process, "indexer")
            cells = [store, busiest, of_indexers, busiest_indexer, by_process["NATS"], sum(by_process.values())]
            row = [str(figures.primaries), str(indexers), f"{figures.rate[indexers]:,.0f}"]
            ingest.add_row(*row, *(f"{cell:.2f}" for cell in cells))
        cells = [figures.choice_us["router"], *_sum_of(figures.choice_us, "store")]
        cells += [figures.overlap_us["router"], *_sum_of(figures.overlap_us, "store")]
        choices.add_row(str(figures.primaries), *(f"{cell:.0f}" for cell in cells), f"{figures.overlap_p50_ms:.2f}")
    return [ingest, choices]
