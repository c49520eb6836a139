"""The cost of digests and checks in the store: the same messages are applied by the unchanged function library and by a
variant without digests, in turn on the same server."""

import os
from statistics import median
from time import perf_counter
from unittest.mock import patch

from benchmarks.result import Result
from kvatlas.blocks.digest import Digest, sums_of
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.events import Checkpoint, IndexEvent, Message, Removed, ScopeUse, SnapshotBegin, SnapshotEnd, Stored
from kvatlas.identity import Scope
from kvatlas.index.redis import apply_call
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.store.connection import Store

USE = ScopeUse(Scope("bench", "bench"), 16)
WORKERS = 16
BLOCKS_A_CALL = 8_000
"""Number of messages that an indexer under load sends in one call."""
CALLS = 8
ROUNDS = 40
CHECKPOINT_EVERY = 1_000
LARGEST_COST_PERCENT = 15.0

WITHOUT = (
    ("local function count_blocks(digest, tier, packed, scope, sign)\n", "  if true then return end\n"),
    ("local function count_sums(digest, tier, count, low, high, scope, sign)\n", "  if true then return end\n"),
    ("local function is_digest_of(c, holder, expected)\n", "  if true then return true end\n"),
    ("local function digest_of(packed)\n", "  if true then return {} end\n"),
    ("  for holder, digest in pairs(c.digests) do\n", "    if true then break end\n"),
)
"""(a line of the library, the code that the variant inserts after it)."""


def build_library_without_digests() -> str:
    """The index's functions without reading, summing, writing or comparing digests. Raises ValueError if the library
    lacks a line that this benchmark expects."""
    code = INDEX_LIBRARY.code
    for line, insertion in WITHOUT:
        if code.count(line) != 1:
            raise ValueError(f"the library has {code.count(line)} lines {line!r}; expected 1")
        code = code.replace(line, line + insertion)
    return code


async def measure(store: Store) -> list[Result]:
    results = []
    for hashes_a_message in (16, 64):
        calls = _calls(hashes_a_message)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        inside: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * ROUNDS):
            with_digests = turn % 4 in (0, 3)
            await store.client.flushall()
            index = await open_redis_index(store, writer=True)
            if not with_digests:
                await store.load_functions(build_library_without_digests())
            await store.client.config_resetstat()
            with patch.object(apply_call, "sums_of", sums_of if with_digests else _no_sums):
                seconds[with_digests].append(await _time_apply(index, calls))
            inside[with_digests].append((await store.client.info("commandstats"))["cmdstat_fcall"]["usec"])
        await INDEX_LIBRARY.load(store)
        blocks = BLOCKS_A_CALL * CALLS
        name = f"{hashes_a_message} hashes per message"
        results += [
            Result(f"apply with digests and checks, {name}", blocks / median(seconds[True]), "blocks/s"),
            Result(f"apply without them, {name}", blocks / median(seconds[False]), "blocks/s"),
            Result(f"cost of digests and checks, {name}", _cost_percent(seconds), "%", LARGEST_COST_PERCENT),
            Result(f"  in the store's function alone, {name}", _cost_percent(inside), "%"),
        ]
    return results


def _cost_percent(times: dict[bool, list[float]]) -> float:
    """The median over pairs of adjacent turns, because the machine's speed changes from turn to turn."""
    return 100 * (median(full / bare for full, bare in zip(times[True], times[False], strict=True)) - 1)


def _no_sums(packed_hashes: bytes) -> tuple[int, int]:
    return 0, 0


async def _time_apply(index: RedisIndex, calls: list[list[PartitionBatch]]) -> float:
    """The duration in seconds of all calls except the first, which begins the incarnations and registers the scopes."""
    await index.apply(0, calls[0])
    began = perf_counter()
    for batches in calls[1:]:
        await index.apply(0, batches)
    return perf_counter() - began


def _calls(hashes_a_message: int) -> list[list[PartitionBatch]]:
    """Calls as publishers make them: stores, a removal of an older message's blocks after every second store, and
    checkpoints."""
    workers = [_MessageSource(f"w{i}", hashes_a_message) for i in range(WORKERS)]
    calls = [[PartitionBatch(worker.partition, [worker.begin()]) for worker in workers]]
    messages = BLOCKS_A_CALL // hashes_a_message // WORKERS
    for _ in range(CALLS):
        calls.append([PartitionBatch(worker.partition, [worker.next() for _ in range(messages)]) for worker in workers])
    return calls


class _MessageSource:
    """The messages of one worker, in order."""

    def __init__(self, worker_id: str, hashes_a_message: int) -> None:
        self.worker_id = worker_id
        self.partition = partition_of(worker_id, 64)
        self._bytes = 8 * hashes_a_message
        self._seq = -1
        self._digest = Digest()
        self._held: list[bytes] = []

    def begin(self) -> wire.RawMessage:
        return self._message(SnapshotBegin(), SnapshotEnd(0, self._digest.words))

    def next(self) -> wire.RawMessage:
        scope_id = USE.scope.scope_id
        if self._seq % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            return self._message(Checkpoint(self._digest.words))
        if self._seq % 3 == 2 and len(self._held) > 4:
            removed = self._held.pop(0)
            self._digest.add(scope_id, Tier.HBM, removed, -1)
            return self._message(Removed(scope_id, Tier.HBM, removed))
        hashes = os.urandom(self._bytes)
        self._held.append(hashes)
        self._digest.add(scope_id, Tier.HBM, hashes)
        return self._message(Stored(scope_id, Tier.HBM, hashes))

    def _message(self, *events: IndexEvent) -> wire.RawMessage:
        self._seq += 1
        return wire.to_raw(Message(self.worker_id, 1, self._seq, events, {USE.scope.scope_id: USE}, 1))
