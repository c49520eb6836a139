"""A router's index that answers overlaps from its own memory, or from the store while its copy can't be trusted.

The copy is read from the store and then kept up to date by the event stream. It answers as long as everything that was in the
stream a moment ago has been applied to it. It is also compared with the store now and then: the records of all workers each
time, and the digests of a few. If it is in doubt, it is dropped, the store answers, and a new copy is made.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from enum import StrEnum
from itertools import islice
from time import monotonic
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.blocks.residency import Overlap, Residency
from kvatlas.bus.admission import Admission
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import stream_fleet
from kvatlas.errors import DATA_ERRORS, KvatlasError, NoIndexYet
from kvatlas.identity import Scope
from kvatlas.index.local_copy.comparison import ShardComparison
from kvatlas.index.local_copy.copy_file import CopyFile
from kvatlas.index.local_copy.counters import ReplicaCounters
from kvatlas.index.local_copy.digest_check import differing_workers
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.local_copy.store_copy import copy_shard, start_position
from kvatlas.index.local_copy.stream_feed import StreamFeed
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.answering_index import AnsweringIndex
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.layout import Layout, layout_errors, read_layout
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas.runtime.background_task import BackgroundTask, end_tasks
from kvatlas.runtime.backoff import Backoff
from kvatlas.store.connection import Store
from kvatlas.telemetry import export_metrics

BLOCK_BYTES = 160
"""Memory that a block or a mark takes, including its place in a dictionary (measured by `python -m
benchmarks.index.replica`)."""
ROW_BYTES = 80
"""Memory that its row number takes in a copy that is kept in a file."""
ENTRY_BYTES = 4
PROBES_A_BOUND = 5
"""How many times within `max_stale_ms` to ask for the end of the stream."""
CHECK_S = 2.0
SWEEP_BLOCKS = 2_000
SWEEP_PAUSE_S = 0.02
VERIFY_FIRST, VERIFY_WORKERS = 1_000, 8
"""The number of workers per shard whose digests are compared: first for a new copy, then in each later check."""
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
TOO_LARGE_PAUSE_S = 30.0
CALM_S = 60.0
"""A copy that has lasted this long resets the pauses between copies."""

log = logging.getLogger("kvatlas.replica")


class ReplicaState(StrEnum):
    """What answers, and why."""

    LOADING = "loading"
    CURRENT = "current"
    STALE = "stale"
    TOO_LARGE = "too large"


class TooLarge(KvatlasError):
    """The copy takes up, or would take up, more memory than is allowed."""


class IndexReplica:
    """One router's copy. It is both an OverlapIndex and a BlockIndex; blocks are looked up in the store."""

    def __init__(self, store: Store, index: AnsweringIndex, settings: ReplicaSettings) -> None:
        """`index`: the store's index, which answers while the copy does not."""
        self.counters = ReplicaCounters()
        self._store = store
        self._index = index
        self._settings = settings
        self._block_bytes = BLOCK_BYTES if settings.file is None else BLOCK_BYTES + ROW_BYTES
        self._file = CopyFile(settings.file, self.counters)
        self._functions = IndexFunctions(store)
        self._copy: MemoryIndex | None = None
        self._feed: StreamFeed | None = None
        self._too_large = False
        self._why = "not loaded yet"
        self._task = BackgroundTask(self._run, "replica")
        self._next_verified = 0

    # ------------------------------------------------------------ questions

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        """See `ResidencyIndex`; `Overlap.source` says what gave the answer. Raises Unreachable if the store had to answer but
        did not."""
        state = self.state
        if state is ReplicaState.CURRENT and self._copy is not None and not verify:
            self.counters.answered += 1
            found = self._copy.overlap_now(scope, hashes, first_index=first_index, limit=limit)
            return found._replace(source=f"replica, at most {self.staleness_s * 1e3:.0f} ms old")
        self.counters.while_loading += state is ReplicaState.LOADING
        self.counters.while_stale += state is ReplicaState.STALE
        self.counters.while_large += state is ReplicaState.TOO_LARGE
        found = await self._index.overlap(scope, hashes, first_index=first_index, limit=limit, verify=verify)
        return found._replace(source=f"store, while the replica is {state.value}")

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        """See `ResidencyIndex`."""
        return await self._index.locate(scope, sequence_hash)

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        """See `ResidencyIndex`."""
        return await self._index.children(scope, prefix_hash)

    @property
    def state(self) -> ReplicaState:
        if self._too_large:
            return ReplicaState.TOO_LARGE
        if self._copy is None:
            return ReplicaState.LOADING
        return ReplicaState.CURRENT if self.staleness_s * 1e3 <= self._settings.max_stale_ms else ReplicaState.STALE

    @property
    def staleness_s(self) -> float:
        """Upper bound for how far the copy lags behind the stream; 0 if there is no copy."""
        return monotonic() - self._feed.current_s if self._copy is not None and self._feed is not None else 0.0

    @property
    def current(self) -> int:
        """1 while the copy answers."""
        return int(self.state is ReplicaState.CURRENT)

    @property
    def blocks(self) -> int:
        """The number of blocks in the copy; each counts once, however many workers hold it."""
        return _count_keys(self._copy) if self._copy is not None else 0

    @property
    def memory_bytes(self) -> int:
        """The estimated memory that the copy takes."""
        return _estimate_bytes(self._copy, self._block_bytes) if self._copy is not None else 0

    def status(self) -> dict[str, Any]:
        """The state in human-readable form, as plain data."""
        state = self.state
        return {
            "state": state.value,
            "why": "" if state is ReplicaState.CURRENT else self._why,
            "staleness_ms": round(self.staleness_s * 1e3, 1),
            "blocks": self.blocks,
            "memory_bytes": self.memory_bytes,
            **asdict(self.counters),
        }

    # ------------------------------------------------------------ the copy

    def start(self) -> None:
        """Make the copy, and keep it up to date in the background."""
        self._task.start()

    async def stop(self) -> None:
        """Drop the copy; the store answers from then on."""
        await self._task.stop()
        self._copy = self._feed = None

    async def _run(self) -> None:
        client = await self._connect()
        try:
            backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            while self._task.running:
                began_s, pause_s = monotonic(), 0.0
                try:
                    self._why = await self._keep_copy(client)
                except TooLarge as error:
                    self._too_large, self._why, pause_s = True, str(error), TOO_LARGE_PAUSE_S
                except (NatsError, KvatlasError, RedisError, TimeoutError, *DATA_ERRORS) as error:
                    self._why = str(error) or type(error).__name__
                self.counters.losses += self._copy is not None
                self._copy = self._feed = None
                if not self._task.running:
                    return
                if monotonic() - began_s > CALM_S:
                    backoff.reset()
                pause_s = pause_s or backoff.next_s()
                log.warning("replica: the store answers overlaps (%s); copying again in %g s", self._why, pause_s)
                await asyncio.sleep(pause_s)
        finally:
            await client.close()

    async def _connect(self) -> Client:
        """Connect, however long that takes: wrong credentials may be corrected while the router runs."""
        while True:
            try:
                return await connect_nats(self._settings.nats, name="kvatlas-replica", on_wait=self._note_wait)
            except KvatlasError as error:
                self._note_wait(str(error))
            await asyncio.sleep(LONGEST_PAUSE_S)

    def _note_wait(self, line: str) -> None:
        self._why = line
        log.warning("replica: %s; the store answers overlaps", line)

    async def _keep_copy(self, client: Client) -> str:
        """Make a copy, and keep it until it is in doubt. Returns the reason."""
        layout = await self._read_layout()
        async with self._file.open(layout) as copy:
            try:
                why = await self._follow(client, layout, copy)
            except (TooLarge, *DATA_ERRORS):
                await self._file.forget(copy)
                raise
            if self._task.running:
                await self._file.forget(copy)
            return why

    async def _follow(self, client: Client, layout: Layout, copy: MemoryIndex) -> str:
        readers = [ShardReader(self._store, ShardKeys(k, layout.number)) for k in range(layout.shards)]
        position = await self._file.resume(copy, client)
        if position is None:
            position = await start_position(client, readers, layout)
            for k, reader in enumerate(readers):
                await copy_shard(reader, copy.shard_at(k), lambda coming: self._check_size(copy, coming))
        self._check_size(copy)
        self._too_large = False
        probe_s = self._settings.max_stale_ms / 1e3 / PROBES_A_BOUND
        fleet_id = await stream_fleet(client)
        admission = Admission(None, layout.partitions, publishers=layout.publishers, fleet_id=fleet_id)
        self._feed = feed = StreamFeed(client, copy, admission, position, self.counters, probe_s=probe_s)
        feeding, sweeping = asyncio.create_task(feed.run()), asyncio.create_task(_sweep(copy))
        try:
            return await self._keep_current(layout, readers, copy, feed, feeding)
        finally:
            await end_tasks([feeding, sweeping])
            if not self._task.running:
                await self._file.save(copy, feed)

    async def _keep_current(
        self,
        layout: Layout,
        readers: Sequence[ShardReader],
        copy: MemoryIndex,
        feed: StreamFeed,
        feeding: "asyncio.Task[None]",
    ) -> str:
        probe_s = self._settings.max_stale_ms / 1e3 / PROBES_A_BOUND
        await self._wait_until_current(feed, feeding, probe_s)
        for worker in (one for k in range(copy.shards) for one in copy.shard_at(k).workers.values()):
            worker.bad = False  # it was set by a checkpoint that was applied to a copy of later blocks
        comparisons = [ShardComparison(copy.shard_at(k)) for k in range(copy.shards)]
        if (why := await self._differs(layout, readers, comparisons, VERIFY_FIRST)) is None:
            await self._wait_until_current(feed, feeding, probe_s)  # the lagging messages must have arrived by then
            why = await self._differs(layout, readers, comparisons, VERIFY_WORKERS)
        while why is None and not feeding.done() and self._task.running:
            if self._copy is None:
                self._copy = copy
                resumed = self._file.is_resumed(copy)
                self.counters.resumed += resumed
                self.counters.loads += not resumed
                log.info("replica: answering overlaps, from %d blocks", self.blocks)
            await self._file.save(copy, feed)
            await asyncio.wait([feeding], timeout=CHECK_S)
            self._check_size(copy)
            why = await self._differs(layout, readers, comparisons, VERIFY_WORKERS)
        if why is None and feeding.done():
            await feeding  # raises the error that ended it
        return why or "the stream's reader ended"

    def _check_size(self, copy: MemoryIndex, coming: int = 0) -> None:
        if (size := _estimate_bytes(copy, self._block_bytes) + self._block_bytes * coming) > self._settings.max_bytes:
            raise TooLarge(f"a copy takes {size >> 20} MiB or more; expected at most {self._settings.max_bytes >> 20}")

    async def _wait_until_current(self, feed: StreamFeed, feeding: "asyncio.Task[None]", pause_s: float) -> None:
        """Wait until everything that is in the stream now has been applied, or until reading has ended."""
        now_s = monotonic()
        while feed.current_s < now_s and not feeding.done() and self._task.running:
            await asyncio.sleep(pause_s / 4)

    async def _read_layout(self) -> Layout:
        with layout_errors(self._store):
            if (layout := await read_layout(self._store)) is None:
                raise NoIndexYet(f"{self._store.name}: no index in this store")
            return layout

    async def _differs(
        self, layout: Layout, readers: Sequence[ShardReader], comparisons: Sequence[ShardComparison], verify: int
    ) -> str | None:
        """Follow the store's changes. Returns how the copy differs from the store, or None. Also returns None if the store does
        not answer, because the stream goes on."""
        try:
            if (now := await self._read_layout()) != layout:
                return f"layout {now.number} of the store answers now, with {now.partitions} partitions"
            for reader, comparison in zip(readers, comparisons, strict=True):
                stored = await reader.records()
                assert self._feed is not None
                if (why := comparison.follow(stored, monotonic(), self._feed.current_s)) is not None:
                    return why
                some = self._next_workers(sorted(comparison.shard.workers), verify)
                wrong, compared = await differing_workers(self._functions, reader.keys, comparison.shard, some)
                self.counters.verified += compared
                self.counters.mismatches += len(wrong)
                if wrong:
                    return f"worker {wrong[0]}: its blocks differ from the store's"
        except (KvatlasError, RedisError) as error:
            log.info("replica: could not compare with the store (%s)", error)
        return None

    def _next_workers(self, worker_ids: Sequence[str], count: int) -> list[str]:
        """The workers whose turn it is to be checked."""
        first = self._next_verified % max(1, len(worker_ids))
        self._next_verified = first + count
        return list(islice([*worker_ids[first:], *worker_ids[:first]], count))


@asynccontextmanager
async def open_replica(store: Store, index: AnsweringIndex, settings: ReplicaSettings) -> AsyncIterator[IndexReplica]:
    """Open a replica that makes its copy in the background. Waits neither for NATS nor for the copy."""
    replica = IndexReplica(store, index, settings)
    replica.start()
    try:
        with export_metrics("index_replica", replica.counters), export_metrics("index_replica_now", replica):
            yield replica
    finally:
        await replica.stop()


async def _sweep(copy: MemoryIndex) -> None:
    """Free the memory of retired holders, a little at a time."""
    while True:
        left = [await copy.sweep(k, SWEEP_BLOCKS) for k in range(copy.shards)]
        if not any(left):
            await copy.forget_scopes(0)
        await asyncio.sleep(SWEEP_PAUSE_S if any(left) else CHECK_S)


def _count_keys(copy: MemoryIndex) -> int:
    return sum(len(blocks) for k in range(copy.shards) for blocks in copy.shard_at(k).table.blocks.values())


def _estimate_bytes(copy: MemoryIndex, block_bytes: int) -> int:
    """The estimated memory of a copy. The work is per scope and worker."""
    tables = [copy.shard_at(k).table for k in range(copy.shards)]
    marked = sum(len(one) for table in tables for by_scope, _ in table.marks.tables for one in by_scope.values())
    entries = sum(holder.digest.blocks for table in tables for holder in table.holders.values())
    return block_bytes * (_count_keys(copy) + marked) + ENTRY_BYTES * entries
