"""Counts what workers hold from the blocks themselves, by reading every block and mark of their shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import HOLDER_ENTRY_BYTES
from kvatlas.blocks.tiers import Tier, are_tiers, tiers_of
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import NUMBER_BYTES, entries_of
from kvatlas.index.mark_lookup import HEAD_ENTRY_BYTES
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import HolderState, unpack_incarnation
from kvatlas.index.redis.scope_registry import ScopeRegistry
from kvatlas.index.redis.shard_reader import ShardReader


@dataclass(frozen=True, slots=True)
class RecountResult:
    """What a worker holds, counted from the blocks themselves: its active holder's digest words by scope.

    As of (incarnation, seq). `moved`: the worker changed during the count, so the count is void. `sound`: every entry has
    at least one tier and no other flags, and its holder is registered as the worker's. `marks`: the digest words of its
    marks; empty if there are none.
    """

    worker_id: str
    incarnation: int
    seq: int
    moved: bool
    scopes: Mapping[Scope, Sequence[int]]
    sound: bool = True
    marks: Sequence[int] = ()


@dataclass(slots=True)
class _Count:
    """A holder's blocks by scope, and its marks. `malformed`: it has an entry that is not one of tiers."""

    scopes: dict[bytes, Digest] = field(default_factory=dict)
    marks: MarkDigest = field(default_factory=MarkDigest)
    malformed: bool = False


async def recount_workers(
    functions: IndexFunctions, reader: ShardReader, registry: ScopeRegistry, worker_ids: Sequence[str]
) -> list[RecountResult]:
    """See `RedisIndex.recount`; all these workers belong to the reader's shard."""
    before = await _read_states(functions, reader.keys, worker_ids)
    counts = {state.holder: _Count() for state in before.values()}
    scope_ids = sorted(await registry.ids())
    for scope_id in scope_ids:
        await _count_blocks(reader, scope_id, counts)
    if any(state.marks for state in before.values()):
        for scope_id in scope_ids:
            await _count_marks(reader, scope_id, counts)
    after, names = await _read_states(functions, reader.keys, worker_ids), await reader.active()
    found = []
    for worker_id, state in before.items():
        count = counts[state.holder]
        marks = count.marks.words if state.marks else []
        named = names.get(state.holder) == worker_id
        sound = named and not count.malformed and marks == list(state.marks or [])
        scopes = {await registry.scope(scope_id): digest.words for scope_id, digest in count.scopes.items()}
        incarnation, moved = unpack_incarnation(state.incarnation), after.get(worker_id) != state
        found.append(RecountResult(worker_id, incarnation, state.seq, moved, scopes, sound, marks))
    return found


async def _read_states(functions: IndexFunctions, keys: ShardKeys, worker_ids: Sequence[str]) -> dict[str, HolderState]:
    """By worker with an active holder."""
    answers = await functions.call_ro_many("kvatlas_state", [(keys.of_state, [one]) for one in worker_ids])
    states = zip(worker_ids, map(HolderState.unpack, answers), strict=True)
    return {worker_id: state for worker_id, state in states if state is not None}


async def _count_blocks(reader: ShardReader, scope_id: bytes, counts: dict[bytes, _Count]) -> None:
    async for batch in reader.block_batches(scope_id):
        held: dict[tuple[bytes, Tier], list[bytes]] = {}
        for key, value in batch:
            for number, flags in _checked_entries(value):
                if number in counts:
                    counts[number].malformed |= not are_tiers(flags)
                    for tier in tiers_of(flags):
                        held.setdefault((number, tier), []).append(key)
        for (number, tier), keys in held.items():
            counts[number].scopes.setdefault(scope_id, Digest()).add(scope_id, tier, b"".join(keys))


@lru_cache(4_096)
def _checked_entries(value: bytes) -> list[tuple[bytes, int]]:
    """The entries of a holders value, with flags 0 if it is not one: entries sorted by number, each number once."""
    whole = len(value) - len(value) % HOLDER_ENTRY_BYTES
    entries = list(entries_of(value[:whole]))
    right = whole == len(value) and all(one[0] < other[0] for one, other in pairwise(entries))
    return entries if right else [(number, 0) for number, _ in entries]


async def _count_marks(reader: ShardReader, scope_id: bytes, counts: dict[bytes, _Count]) -> None:
    values: dict[bytes, bytes] = {}  # a scan may return a field twice
    async for some in reader.scan(reader.keys.marks(scope_id)):
        values.update(some)
    for name, value in values.items():
        is_head = len(name) > HASH_BYTES
        size = HEAD_ENTRY_BYTES if is_head else NUMBER_BYTES
        for at in range(0, len(value), size):
            count = counts.get(value[at : at + NUMBER_BYTES])
            if count is not None and is_head:
                bits = int.from_bytes(value[at + NUMBER_BYTES : at + size], "big")
                count.marks.add_head(scope_id, name[:HASH_BYTES], bits)
            elif count is not None:
                count.marks.add_marks(scope_id, name)
