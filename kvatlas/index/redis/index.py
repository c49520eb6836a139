"""The residency index in Redis or Valkey, which all routers and indexers share; each shard is one slot.

Each write is one server-side function (`functions/*.lua`); this file only lists the keys and reads the answers.
"""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from math import inf

from redis.exceptions import OutOfMemoryError, ResponseError

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import (
    IndexMetrics,
    IndexWork,
    Overlap,
    Residency,
    ResidentBlocks,
    ResidentCount,
    residency_order,
)
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import partition_of
from kvatlas.errors import InvalidValue, NoIndexYet, NotSupported
from kvatlas.identity import Scope, shard_of
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.direct_writes import DirectWrites
from kvatlas.index.mark_lookup import check_reach, has_mark
from kvatlas.index.protocol import ApplyResult, Room, ScrubResult, WorkerRecord
from kvatlas.index.redis.apply_call import ApplyAnswer, pack_call, unpack_answer
from kvatlas.index.redis.call_plan import CALL_COST, CallBatch, Place, cut_call
from kvatlas.index.redis.index_functions import INDEX_LIBRARY, IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.layout import Layout, check_suitable, layout_errors, make_layout, read_layout
from kvatlas.index.redis.lookup.overlap_lookup import OverlapLookup
from kvatlas.index.redis.pins import Pins
from kvatlas.index.redis.records import (
    HolderState,
    pack_incarnation,
    pack_position,
    unpack_incarnation,
    unpack_position,
)
from kvatlas.index.redis.recount import WORKERS_A_PASS, Recount, RecountResult
from kvatlas.index.redis.residency_reader import ResidencyReader, residencies_of
from kvatlas.index.redis.scope_registry import ScopeRegistry
from kvatlas.index.redis.scrub import Scrub
from kvatlas.index.redis.shard_reader import BLOCKS_A_CALL, SCAN_COUNT, ShardReader
from kvatlas.index.redis.sweep import Sweep
from kvatlas.index.redis.usage_reader import UsageReader
from kvatlas.index.redis.wipe_recovery import WipeRecovery
from kvatlas.index.usage import ResidentUse, sum_use
from kvatlas.runtime.retry import retry_until_reachable
from kvatlas.store.connection import Store

REUSE_MS = 10 * 60 * 1000
"""A holder's number is not reused before this time has passed, because clients may cache names."""
RECORDS_A_CALL = 250

WEIGHTS_REMEMBERED = 10_000

_SIZE_TRIES = 3
"""After a call has been cut this many times, it is made whatever it costs, because values grow in the meantime."""


async def open_redis_index(
    store: Store,
    *,
    partitions: int | None = None,
    shards: int | None = None,
    side_index: bool | None = None,
    number: int | None = None,
    writer: bool,
    reuse_ms: int = REUSE_MS,
    wait: bool = False,
    on_wait: Callable[[str], None] | None = None,
) -> "RedisIndex":
    """Open the index that is in this store.

    A writer loads the functions, and creates the layout or checks it; a reader only reads it. `number`: the number of one of
    several layouts; None: the one that answers. `side_index` records which block follows which, for `children`; None: as the
    store is laid out, and off in an empty store. Raises LayoutMismatch, UnsuitableStore or Unreachable (also if a store without
    memory has to be laid out) and, for a reader, NoIndexYet. If `wait` is set, it tries again after the last two, with
    back-off, and calls `on_wait` with a line for the user each time.
    """

    async def attempt() -> Layout:
        with layout_errors(store):
            if not writer:
                if (found := await read_layout(store, number)) is None:
                    raise NoIndexYet(f"{store.name}: no index there yet; start an indexer first")
                return found
            await check_suitable(store)
            layout = await make_layout(store, partitions, shards, side_index, number)
            await INDEX_LIBRARY.load(store)
            return layout

    layout = await retry_until_reachable(attempt, wait=wait, on_wait=on_wait)
    return RedisIndex(store, layout, writer=writer, reuse_ms=reuse_ms)


class RedisIndex(DirectWrites):
    """A ResidencyIndex in Redis or Valkey; see the protocol for its promises."""

    name = "redis"
    persistent = True

    def __init__(self, store: Store, layout: Layout, *, writer: bool, reuse_ms: int = REUSE_MS) -> None:
        self.layout = layout
        self.partitions, self.shards = layout.partitions, layout.shards
        self._store = store
        self._side_index = layout.side_index
        self._writer = writer
        self._functions = IndexFunctions(store)
        self._keys = [ShardKeys(k, layout.number) for k in range(layout.shards)]
        self._readers = [ShardReader(store, keys) for keys in self._keys]
        self._pins = [Pins(store, keys) for keys in self._keys]
        self._lookup = OverlapLookup(self._functions, self._readers)
        self._sweeps = [Sweep(keys, self._side_index) for keys in self._keys]
        self._scrubs = [Scrub(keys, self._side_index) for keys in self._keys]
        self._weights: list[dict[bytes, float]] = [{} for _ in self._keys]
        """The cost of a block, by shard and scope: see `cut_call`."""
        self._reuse_ms = reuse_ms
        self._registry = ScopeRegistry(store, self._functions)
        self._recovery = WipeRecovery(store, self._registry, layout)
        self._usage = [UsageReader(store, self._functions, keys) for keys in self._keys]
        self._counts = ApplyCounts()
        self._prefix_scans = 0

    @property
    def shard_keys(self) -> Sequence[ShardKeys]:
        """The keys of each shard, for a call that does its own lookup (`kvatlas/reservations/functions/_held_blocks.lua`)."""
        return self._keys

    # ------------------------------------------------------------ writing

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        await self._recovery.check()
        await self._registry.register(batches)
        self._scrubs[shard].note(batches)
        records: dict[str, WorkerRecord] = {}
        moved: set[int] = set()
        total, no_room, weights = ApplyCounts(), False, self._weights[shard]
        place: Place | None = Place()
        too_large = 0
        while place is not None:
            call, following = cut_call(batches, place, weights)
            most_cost = 2 * CALL_COST if too_large < _SIZE_TRIES else inf
            answer, full = await self._apply_call(shard, call, most_cost)
            if answer.records is None:
                too_large += 1  # with the new weights, the next call will be smaller
                continue
            place, too_large, no_room = following, 0, no_room or full
            records.update((record.worker_id, record) for record in answer.records)
            moved.update(answer.moved)
            total += answer.counts
        self._counts += total
        return ApplyResult.of(list(records.values()), total, sorted(moved), no_room=no_room)

    async def _apply_call(self, shard: int, call: Sequence[CallBatch], most_cost: float) -> tuple[ApplyAnswer, bool]:
        """Make one call and learn its weights. Returns the answer, and whether the store is out of memory."""
        k, weights = self._keys[shard], self._weights[shard]
        scope_ids, with_marks, argument = pack_call(self._reuse_ms, most_cost, call, parents=self._side_index)
        keys = [k.workers, k.holders, k.active, k.retired, k.free, k.digests, k.touched, k.partitions, k.meta, k.steps]
        keys += [k.held, k.moments, *(k.blocks(scope_id) for scope_id in scope_ids)]
        if self._side_index:
            keys += [key for scope_id in scope_ids for key in (k.children(scope_id), k.parents(scope_id))]
        keys += [k.marked, *(k.marks(scope_id) for scope_id in with_marks)]
        no_room = False
        try:
            packed = await self._functions.call("kvatlas_apply", keys, [argument])
        except OutOfMemoryError:
            # close the workers whose stores can't be applied: this frees memory, and removals continue
            packed = await self._functions.call("kvatlas_apply_oom", keys, [argument])
            no_room = True
        except ResponseError as error:
            if "@user_function" in str(error):  # not the store's fault: a worker's data can't be read
                raise InvalidValue(f"the store's function failed: {error}") from error
            raise
        answer = unpack_answer(packed)
        if len(weights) > WEIGHTS_REMEMBERED:
            weights.clear()
        weights.update((scope_id, weight) for scope_id, weight in zip(scope_ids, answer.weights, strict=True) if weight)
        return answer, no_room

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        k = self._keys_of(worker_id)
        args = [worker_id, pack_incarnation(incarnation)]
        return bool(
            await self._functions.call("kvatlas_retire", [k.workers, k.holders, k.active, k.retired, k.meta], args)
        )

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        args = [worker_id, pack_incarnation(incarnation)]
        k = self._keys_of(worker_id)
        return bool(await self._functions.call("kvatlas_forget", [k.workers, k.steps], args))

    async def forget_scopes(self, idle_s: float) -> int:
        if not self._recovery.answering:
            return 0  # the layout that answers may have blocks of a scope that this one has not received yet
        return await self._registry.forget(self._keys, idle_s, self._usage)

    async def unlink(self) -> int:
        """Delete every key of every shard. Returns the number of keys. Only for an index that is no longer read from or written
        to."""
        scope_ids, deleted = set(await self._registry.ids()), 0
        for k, reader, pins in zip(self._keys, self._readers, self._pins, strict=True):
            touched = [set(holder.touched) async for holder in reader.active_holders()]
            for key in k.all(scope_ids.union(*touched), await pins.holders()):
                deleted += await self._store.ask(self._store.client.unlink(key))
        return deleted

    async def clear(self) -> None:
        for k in self._keys:
            async for key in self._store.client.scan_iter(match=k.pattern, count=SCAN_COUNT):
                await self._store.client.unlink(key)

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        return await self._sweeps[shard].run(self._store.client, self._functions, budget_blocks)

    async def room(self, shard: int) -> Room:
        used, limit, policy = await self._functions.call_ro("kvatlas_room", [self._keys[shard].meta])
        return Room(used, limit, policy != b"noeviction")

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        reader = self._readers[shard]
        return await self._scrubs[shard].run(
            self._functions, lambda: self._count_blocks(reader, partitions), self._registry.ids, budget_blocks
        )

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        if expected is None and self._writer:
            await self._recovery.recover()
        k = self._keys[shard_of(partition, self.shards)]
        args = [partition, pack_position(expected), pack_position(new)]
        server, cursor = b"", b""
        while cursor != b"0":
            more = [server, cursor, RECORDS_A_CALL]
            answer = await self._functions.call("kvatlas_set_position", [k.partitions, k.workers], args + more)
            stored, server, cursor = answer
        return unpack_position(stored)

    # ------------------------------------------------------------ questions

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        self._prefix_scans += 1
        return await self._lookup.overlap(scope.scope_id, hashes, check_reach(first_index, limit), verify=verify)

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        found: list[Residency] = []
        key = sequence_hash.to_bytes(HASH_BYTES, "little")
        for reader, pins in zip(self._readers, self._pins, strict=True):
            keys = [reader.keys.blocks(scope.scope_id), reader.keys.active]
            here: list[tuple[bytes, Residency]] = []
            flat = await self._functions.call_ro("kvatlas_locate", keys, [key])
            marked = await reader.dropped() if flat else {}
            marks = await reader.marks(scope.scope_id, key) if marked else {}
            for flags, holder, worker_id in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
                sizes = (await reader.touched(holder)).get(scope.scope_id, BlockSizes())
                resumable = has_mark(marks.get(key), holder) if holder in marked else None
                held = residencies_of(scope, sequence_hash, worker_id.decode(), flags, sizes, resumable)
                here += ((holder, one) for one in held)
            found += await pins.mark(here, await pins.holders()) if here else []
        return sorted(found, key=residency_order)

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[Residency]:
        if not self._side_index:
            raise NotSupported(
                f"{self._store.name} has no side index, which children of a prefix need: start the indexers with "
                "--side-index on an empty store"
            )
        self._prefix_scans += 1
        parent = prefix_hash.to_bytes(HASH_BYTES, "little") if prefix_hash is not None else b""
        found: list[Residency] = []
        for reader, pins in zip(self._readers, self._pins, strict=True):
            hashes = await reader.children(scope.scope_id, parent)
            residencies = await ResidencyReader.open(reader, pins)
            for first in range(0, len(hashes), BLOCKS_A_CALL):
                some = hashes[first : first + BLOCKS_A_CALL]
                values = await reader.values(scope.scope_id, some)
                found += await residencies.of_blocks(scope, [(k, v) for k, v in zip(some, values, strict=True) if v])
        return sorted(found, key=residency_order)

    async def record(self, worker_id: str) -> WorkerRecord | None:
        record = await self._reader_of(worker_id).record(worker_id)
        return record.of_worker(worker_id) if record is not None else None

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        found = await self._readers[shard].records(repair=self._writer)
        return [record.of_worker(worker_id) for worker_id, record in found.items()]

    async def position(self, partition: int) -> Position | None:
        return await self._readers[shard_of(partition, self.shards)].position(partition)

    async def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        for shard in range(self.shards) if worker_id is None else [self._shard_of(worker_id)]:
            residencies = await ResidencyReader.open(self._readers[shard], self._pins[shard], worker_id)
            async for residency in residencies.snapshot(self._registry):
                yield residency

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        packed = await self._functions.call_ro("kvatlas_look", self._keys_of(worker_id).of_state, [worker_id])
        state = HolderState.unpack(packed)
        return None if state is None else [*state.digest, *(state.marks or ())]

    async def claimed(self, worker_ids: Sequence[str]) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for shard in sorted({self._shard_of(worker_id) for worker_id in worker_ids}):
            reader = self._readers[shard]
            records = await reader.records()
            held = [
                (worker_id, holder)
                for worker_id in worker_ids
                if self._shard_of(worker_id) == shard and (record := records.get(worker_id)) is not None
                for holder in (record.active, record.loading)
                if holder
            ]
            for (worker_id, _), words in zip(held, await reader.digests([one for _, one in held]), strict=True):
                found[worker_id] = max(found.get(worker_id, 0), sum(words[0::3]))
        return found

    async def recount(self, worker_ids: Sequence[str]) -> Sequence[RecountResult]:
        """Count from the blocks, not from digests, what these workers hold. Workers without an active holder are left out.
        Reads every block in the workers' shards."""
        scope_ids = await self._registry.ids()
        by_shard: dict[ShardKeys, list[str]] = {}
        for worker_id in worker_ids:
            by_shard.setdefault(self._keys_of(worker_id), []).append(worker_id)
        found = []
        for k, workers in by_shard.items():
            for first in range(0, len(workers), WORKERS_A_PASS):
                recount = Recount(k, workers[first : first + WORKERS_A_PASS], scope_ids)
                for one in await recount.complete(self._functions):
                    if one.state is not None:
                        scopes = {await self._registry.scope(id): digest.words for id, digest in one.by_scope.items()}
                        incarnation = unpack_incarnation(one.state.incarnation)
                        found.append(
                            RecountResult(
                                one.worker_id,
                                incarnation,
                                one.state.seq,
                                one.moved,
                                scopes,
                                one.sound,
                                one.marks.words if one.stored is not None and one.stored.marks else (),
                            )
                        )
        return found

    async def length(self) -> int:
        total = 0
        for reader in self._readers:
            total += sum(sum(digest[0::3]) for digest in await reader.digests(list(await reader.active())))
        return total

    async def metrics(self) -> IndexMetrics:
        found = ResidentCount()
        for reader in self._readers:
            async for holder in reader.active_holders():
                sizes = holder.touched
                if len({((await self._registry.scope(one)).model_id, *size[1:]) for one, size in sizes.items()}) > 1:
                    held = await reader.held(holder)
                else:  # attribute everything to an arbitrary scope
                    held = {(one, tier): holder.by_tier[tier] for one in list(sizes)[:1] for tier in Tier}
                for (scope_id, tier), blocks in held.items():
                    found.add(scope_id, tier, blocks, sizes[scope_id].bytes_in(tier))
        return found.by_model(await self._scopes_of(found))

    @property
    def work(self) -> IndexWork:
        counts = self._counts
        return IndexWork(counts.stored, counts.removed, self._prefix_scans, counts.bytes_written)

    async def resident_blocks(self) -> Sequence[ResidentBlocks]:
        found = ResidentCount()
        for reader in self._readers:
            async for holder in reader.active_holders():
                for (scope_id, tier), blocks in (await reader.held(holder)).items():
                    found.add(scope_id, tier, blocks, holder.touched[scope_id].bytes_in(tier))
        return found.by_scope(await self._scopes_of(found))

    async def usage(self) -> Sequence[ResidentUse]:
        amounts = [one for usage in self._usage for one in await usage.read()]
        return sum_use(amounts, await self._registry.known({scope_id for scope_id, _, _ in amounts}))

    # ------------------------------------------------------------ pieces

    async def _pin(self, worker_id: str, scope_id: bytes, tier: Tier, hashes: bytes, *, pinned: bool) -> None:
        record = await self._reader_of(worker_id).record(worker_id)
        if record is not None and record.active:  # otherwise the holder was closed meanwhile: nothing is pinned
            await self._pins[self._shard_of(worker_id)].put(record.active, scope_id, tier, hashes, pinned=pinned)

    async def _scopes_of(self, found: ResidentCount) -> dict[bytes, Scope]:
        return {scope_id: await self._registry.scope(scope_id) for scope_id in found.scope_ids}

    async def _count_blocks(self, reader: ShardReader, partitions: Collection[int] | None) -> list[tuple[str, int]]:
        """(worker, number of its blocks according to its digest) for each worker of these partitions that has an active
        holder."""
        active = {
            worker_id: record.active
            for worker_id, record in (await reader.records()).items()
            if record.active and (partitions is None or partition_of(worker_id, self.partitions) in partitions)
        }
        if not active:
            return []
        digests = await reader.digests(list(active.values()))
        return [(worker_id, sum(digest[0::3])) for worker_id, digest in zip(active, digests, strict=True)]

    def _keys_of(self, worker_id: str) -> ShardKeys:
        return self._keys[self._shard_of(worker_id)]

    def _reader_of(self, worker_id: str) -> ShardReader:
        return self._readers[self._shard_of(worker_id)]

    def _shard_of(self, worker_id: str) -> int:
        return shard_of(partition_of(worker_id, self.partitions), self.shards)
