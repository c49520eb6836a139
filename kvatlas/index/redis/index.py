"""The residency index in Redis or Valkey: shared by all routers and indexers, one slot a shard.

Each write is one server-side function (`functions/*.lua`); this file only names keys and reads answers.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, cast

import msgpack
from redis.exceptions import OutOfMemoryError, ResponseError

from kvatlas.blocks.digest import WORDS
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import IndexMetrics, Overlap, Residency, ShardRuns
from kvatlas.blocks.tiers import FLAG_PINNED, tiers_of
from kvatlas.errors import NoIndexYet, NotSupported, Unreachable
from kvatlas.identity import Scope, partition_of, shard_of
from kvatlas.index.direct_writes import DirectWrites
from kvatlas.index.gallop import STRIDE
from kvatlas.index.protocol import Applied, PartitionBatch, Position, Recounted, Room, Scrubbed, WorkerRecord
from kvatlas.index.redis.apply_call import active_holder, pack_call, records_of, unpack_answer
from kvatlas.index.redis.holder_names import HolderNames
from kvatlas.index.redis.keys import SCOPES, ShardKeys
from kvatlas.index.redis.layout import check_suitable, layout_id, library, make_layout, read_layout
from kvatlas.index.redis.recount import WORKERS_A_PASS, Recount
from kvatlas.index.redis.scope_registry import FRESH_S, ScopeRegistry
from kvatlas.index.redis.scrub import Scrub
from kvatlas.index.redis.sweep import Sweep
from kvatlas.index.redis.values import blocks_in, scopes_touched
from kvatlas.index.verify import differences
from kvatlas.runtime.retry import retry_until_reachable
from kvatlas.store.connection import UNREACHABLE, Store, reason

REUSE_MS = 10 * 60 * 1000
"""A holder's number is used again after this long: clients may cache names."""

_SCAN_COUNT = 1_000
FUNCTIONS_GONE = "Function not found"
_NAME_TRIES = 3


async def open_redis_index(
    store: Store,
    *,
    partitions: int | None = None,
    shards: int | None = None,
    side_index: bool = False,
    writer: bool,
    reuse_ms: int = REUSE_MS,
    wait: bool = False,
    on_wait: Callable[[str], None] | None = None,
) -> "RedisIndex":
    """The index in this store.

    A writer loads the functions and makes the layout, or checks it; a reader only reads it. `side_index` keeps which
    block follows which, for `children`; every writer of a store must agree on it. Raises LayoutMismatch, UnsuitableStore;
    Unreachable (also where a store without room has to be laid out) and, for a reader, NoIndexYet: with `wait` these are
    tried again with back-off, and `on_wait` is told each time.
    """

    async def attempt() -> tuple[int, int]:
        try:
            if not writer:
                if (found := await read_layout(store)) is None:
                    raise NoIndexYet(f"{store.name}: no index there yet; start an indexer first")
                return found
            await check_suitable(store)
            layout = await make_layout(store, partitions, shards)
            await store.load_functions(library())
            return layout
        except OutOfMemoryError as error:
            raise Unreachable(_no_room_for_layout(store)) from error
        except UNREACHABLE as error:
            raise Unreachable(f"{store.name}: {reason(error)}") from error

    layout = await retry_until_reachable(attempt, wait=wait, on_wait=on_wait)
    return RedisIndex(store, *layout, side_index=side_index, writer=writer, reuse_ms=reuse_ms)


class RedisIndex(DirectWrites):
    """A ResidencyIndex in Redis or Valkey; see the protocol for its promises."""

    persistent = True

    def __init__(
        self, store: Store, partitions: int, shards: int, *, side_index: bool, writer: bool, reuse_ms: int = REUSE_MS
    ) -> None:
        self.partitions = partitions
        self.shards = shards
        self._store = store
        self._side_index = side_index
        self._writer = writer
        self._keys = [ShardKeys(k) for k in range(shards)]
        self._names = [HolderNames(keys) for keys in self._keys]
        self._sweeps = [Sweep(keys, side_index) for keys in self._keys]
        self._scrubs = [Scrub(keys, side_index) for keys in self._keys]
        self._reuse_ms = reuse_ms
        self._registry = ScopeRegistry(self._fcall)
        self._layout_id: bytes | None = None
        self._kept_s = -FRESH_S
        self._puts = self._removes = self._prefix_scans = self._bytes_written = 0

    # ------------------------------------------------------------ writing

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> Applied:
        await self._keep_registered()
        await self._registry.register(batches)
        self._scrubs[shard].notice(batches)
        scope_ids, argument = pack_call(self._reuse_ms, batches, parents=self._side_index)
        k = self._keys[shard]
        keys = [k.workers, k.holders, k.active, k.retired, k.free, k.digests, k.touched, k.partitions, k.meta]
        keys += [k.blocks(scope_id) for scope_id in scope_ids]
        if self._side_index:
            keys += [key for scope_id in scope_ids for key in (k.children(scope_id), k.parents(scope_id))]
        try:
            answer = await self._fcall("kvatlas_apply", keys, [argument])
            no_room = False
        except OutOfMemoryError:
            # closes the workers whose stores can't be applied: that gives memory back, and removals go on
            answer = await self._fcall("kvatlas_apply_oom", keys, [argument])
            no_room = True
        applied, counts = unpack_answer(answer)
        self._puts += counts["stored"]
        self._removes += counts["removed"]
        self._bytes_written += counts["bytes_written"]
        return replace(applied, no_room=True) if no_room else applied

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        k = self._keys_of(worker_id)
        args = [worker_id, incarnation.to_bytes(8, "big")]
        return bool(await self._fcall("kvatlas_retire", [k.workers, k.holders, k.active, k.retired, k.meta], args))

    async def forget(self, worker_id: str, incarnation: int) -> bool:
        args = [worker_id, incarnation.to_bytes(8, "big")]
        return bool(await self._fcall("kvatlas_forget", [self._keys_of(worker_id).workers], args))

    async def forget_scopes(self, idle_s: float) -> int:
        return await self._registry.forget(self._keys, idle_s)

    async def clear(self) -> None:
        for k in self._keys:
            async for key in self._store.client.scan_iter(match=k.pattern, count=_SCAN_COUNT):
                await self._store.client.unlink(key)

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        return await self._sweeps[shard].run(self._store.client, self._fcall, budget_blocks)

    async def room(self, shard: int) -> Room:
        used, limit, policy = await self._fcall_ro("kvatlas_room", [self._keys[shard].meta], [])
        return Room(used, limit, policy != b"noeviction")

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> Scrubbed:
        k = self._keys[shard]
        return await self._scrubs[shard].run(
            self._fcall, self._fcall_ro, lambda: self._held_by(k, partitions), self._scopes_known, budget_blocks
        )

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        if expected is None and self._writer:
            await self._register_again()
        k = self._keys[shard_of(partition, self.shards)]
        args = [partition, _position_out(expected) if expected is not None else "", _position_out(new)]
        return _position_in(await self._fcall("kvatlas_set_position", [k.partitions, k.workers], args))

    # ------------------------------------------------------------ asking

    async def overlap(self, scope: Scope, hashes: bytes, *, verify: bool = False) -> Overlap:
        self._prefix_scans += 1
        found = await self._overlap(scope.scope_id, hashes, STRIDE)
        if not verify:
            return found
        walked = await self._overlap(scope.scope_id, hashes, 0)
        return Overlap(found.shards, found.looked_up, differences(found, walked))

    async def _overlap(self, scope_id: bytes, hashes: bytes, stride: int) -> Overlap:
        calls = [([k.blocks(scope_id), k.meta], [hashes, stride]) for k in self._keys]
        for attempt in range(_NAME_TRIES):
            answers = await self._asked_again(lambda: self._store.fcall_ro_many("kvatlas_overlap", calls))
            shards = []
            for names, (version, values, lengths) in zip(self._names, answers, strict=True):
                if names.version != version:
                    await names.read(self._fcall_ro)
                if names.version == version or attempt == _NAME_TRIES - 1:
                    shards.append(ShardRuns(values, lengths, names.at(version)))
            if len(shards) == self.shards:
                break
        return Overlap(shards, len(hashes) // HASH_BYTES)

    async def locate(self, scope: Scope, sequence_hash: int) -> Sequence[Residency]:
        found: list[Residency] = []
        for k in self._keys:
            args = [sequence_hash.to_bytes(HASH_BYTES, "little")]
            flat = await self._fcall_ro("kvatlas_locate", [k.blocks(scope.scope_id), k.active], args)
            for flags, holder, worker_id in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
                touched = scopes_touched(await self._ask(self._store.client.hget(k.touched, holder)))
                _, block_bytes = touched.get(scope.scope_id, (0, 0))
                found += _residencies(scope, sequence_hash, worker_id.decode(), flags, block_bytes)
        return sorted(found, key=lambda residency: (residency.worker_id, residency.tier))

    async def children(self, scope: Scope, prefix_hash: int | None) -> Sequence[int]:
        if not self._side_index:
            raise NotSupported("children of a prefix; open the index with its side index for that")
        field = prefix_hash.to_bytes(HASH_BYTES, "little") if prefix_hash is not None else b""
        held: set[int] = set()
        for k in self._keys:
            packed = await self._ask(self._store.client.hget(k.children(scope.scope_id), field)) or b""
            hashes = [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]
            if hashes:
                values = await self._ask(self._store.client.hmget(k.blocks(scope.scope_id), hashes))
                active = await self._active(k)
                for key, value in zip(hashes, values, strict=True):
                    if any(holder in active for holder, _ in blocks_in(value or b"")):
                        held.add(int.from_bytes(key, "little"))
        return sorted(held)

    async def record(self, worker_id: str) -> WorkerRecord | None:
        packed = await self._ask(self._store.client.hget(self._keys_of(worker_id).workers, worker_id))
        return next(iter(records_of([(worker_id.encode(), packed)]))) if packed is not None else None

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        found = await self._ask(self._store.client.hgetall(self._keys[shard].workers))
        return list(records_of(found.items()))

    async def position(self, partition: int) -> Position | None:
        k = self._keys[shard_of(partition, self.shards)]
        return _position_in(await self._ask(self._store.client.hget(k.partitions, str(partition))))

    async def snapshot(self, worker_id: str | None = None) -> AsyncIterator[Residency]:
        for k in self._keys if worker_id is None else [self._keys_of(worker_id)]:
            active = {h: name for h, name in (await self._active(k)).items() if worker_id in (None, name)}
            touched = {h: scopes_touched(await self._ask(self._store.client.hget(k.touched, h))) for h in active}
            for scope_id in sorted({scope_id for scopes in touched.values() for scope_id in scopes}):
                if not await self._ask(self._store.client.exists(k.blocks(scope_id))):
                    continue  # it may be forgotten
                scope = await self._scope(scope_id)
                seen: set[bytes] = set()  # a scan may say a field twice
                async for key, value in self._store.client.hscan_iter(k.blocks(scope_id), count=_SCAN_COUNT):
                    if key in seen:
                        continue
                    seen.add(key)
                    for holder, flags in blocks_in(value):
                        if holder in active:
                            _, size = touched[holder].get(scope_id, (0, 0))
                            for residency in _residencies(
                                scope, int.from_bytes(key, "little"), active[holder], flags, size
                            ):
                                yield residency

    async def digest(self, worker_id: str) -> Sequence[int] | None:
        k = self._keys_of(worker_id)
        packed = await self._ask(self._store.client.hget(k.workers, worker_id))
        holder = active_holder(packed) if packed is not None else b""
        return await self._digest(k, holder) if holder else None

    async def length(self) -> int:
        return (await self.metrics()).resident_blocks

    async def metrics(self) -> IndexMetrics:
        blocks = resident_bytes = 0
        for k in self._keys:
            for holder in await self._active(k):
                held = sum((await self._digest(k, holder))[0::3])
                touched = scopes_touched(await self._ask(self._store.client.hget(k.touched, holder)))
                blocks += held
                resident_bytes += held * max((size for _, size in touched.values()), default=0)
        return IndexMetrics(blocks, resident_bytes, self._puts, self._removes, self._prefix_scans, self._bytes_written)

    # ------------------------------------------------------------ pieces

    async def _keep_registered(self) -> None:
        """Once a second at most: a store that lost the layout and the scopes (another writer may have seen to the layout
        since) gets again what this writer wrote lately."""
        now_s = monotonic()
        if now_s >= self._kept_s + FRESH_S:
            await self._register_again()
            self._kept_s = now_s

    async def _register_again(self) -> None:
        try:
            found = await layout_id(self._store)
            if found is None:
                await make_layout(self._store, self.partitions, self.shards)
                found = await layout_id(self._store)
            lately = self._registry.lately
            if lately and (found != self._layout_id or await self._store.client.hlen(SCOPES) < lately):
                await self._registry.register_again()
            self._layout_id = found
        except OutOfMemoryError as error:
            raise Unreachable(_no_room_for_layout(self._store)) from error
        except UNREACHABLE as error:
            raise Unreachable(f"{self._store.name}: {reason(error)}") from error

    async def _scope(self, scope_id: bytes) -> Scope:
        known = self._registry.known(scope_id)
        if known is not None:
            return known
        return self._registry.remember(scope_id, await self._ask(self._store.client.hget(SCOPES, scope_id)))

    async def _active(self, k: ShardKeys) -> dict[bytes, str]:
        found = await self._ask(self._store.client.hgetall(k.active))
        return {holder: worker_id.decode() for holder, worker_id in found.items()}

    async def _held_by(self, k: ShardKeys, partitions: Collection[int] | None) -> list[tuple[str, int]]:
        """(worker, blocks by its digest) of every worker of these partitions that answers."""
        records = await self._ask(self._store.client.hgetall(k.workers))
        holders = {
            worker_id.decode(): active_holder(packed)
            for worker_id, packed in records.items()
            if partitions is None or partition_of(worker_id.decode(), self.partitions) in partitions
        }
        answering = {worker_id: holder for worker_id, holder in holders.items() if holder}
        if not answering:
            return []
        digests = await self._ask(self._store.client.hmget(k.digests, list(answering.values())))
        words = [msgpack.unpackb(packed) if packed is not None else () for packed in digests]
        return [(worker_id, sum(one[0:WORDS:3])) for worker_id, one in zip(answering, words, strict=True)]

    async def recount(self, worker_ids: Sequence[str]) -> Sequence[Recounted]:
        scope_ids = await self._scopes_known()
        by_shard: dict[ShardKeys, list[str]] = {}
        for worker_id in worker_ids:
            by_shard.setdefault(self._keys_of(worker_id), []).append(worker_id)
        found = []
        for k, workers in by_shard.items():
            for first in range(0, len(workers), WORKERS_A_PASS):
                recount = Recount(k, workers[first : first + WORKERS_A_PASS], scope_ids)
                while not recount.ended:
                    await recount.part(self._fcall_ro)
                for one in await recount.finish(self._fcall_ro):
                    if one.state is not None:
                        scopes = {await self._scope(scope_id): d.words for scope_id, d in one.by_scope.items()}
                        incarnation = int.from_bytes(one.state[0], "big")
                        found.append(Recounted(one.worker_id, incarnation, one.state[1], one.moved, scopes, one.sound))
        return found

    async def _scopes_known(self) -> list[bytes]:
        return list(await self._ask(self._store.client.hkeys(SCOPES)))

    async def _digest(self, k: ShardKeys, holder: bytes) -> list[int]:
        packed = await self._ask(self._store.client.hget(k.digests, holder))
        return cast(list[int], msgpack.unpackb(packed)[:WORDS]) if packed is not None else [0] * WORDS

    async def _fcall(self, function: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._asked_again(lambda: self._store.fcall(function, keys, args))

    async def _fcall_ro(self, function: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._asked_again(lambda: self._store.fcall_ro(function, keys, args))

    async def _asked_again(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """A call, once more where somebody flushed the functions: a writer loads them, a reader waits for one that does."""
        try:
            return await call()
        except ResponseError as error:
            if FUNCTIONS_GONE not in str(error):
                raise
        if self._writer:
            await self._store.load_functions(library())
            return await call()
        raise Unreachable(f"{self._store.name}: its functions are gone; the next indexer that looks loads them again")

    async def _ask(self, answer: Any) -> Any:
        try:
            return await answer
        except UNREACHABLE as error:
            raise Unreachable(f"{self._store.name}: {reason(error)}") from error

    def _keys_of(self, worker_id: str) -> ShardKeys:
        return self._keys[shard_of(partition_of(worker_id, self.partitions), self.shards)]


def _no_room_for_layout(store: Store) -> str:
    return f"{store.name}: it is out of memory (maxmemory), and has to be laid out"


def _residencies(scope: Scope, sequence_hash: int, worker_id: str, flags: int, block_bytes: int) -> list[Residency]:
    pinned = bool(flags & FLAG_PINNED)
    return [Residency(scope, sequence_hash, worker_id, tier, block_bytes, pinned=pinned) for tier in tiers_of(flags)]


def _position_out(position: Position) -> str:
    return f"{position.creation_us} {position.seq}"


def _position_in(stored: bytes | None) -> Position | None:
    return Position(*map(int, stored.split())) if stored else None
