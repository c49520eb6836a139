"""Counting what some workers hold from the blocks themselves: one pass over every scope of a shard."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import NamedTuple

import msgpack

from kvatlas.blocks.digest import Digest, FlagDigest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import TIER_MASK, Tier, tiers_of
from kvatlas.bus import wire
from kvatlas.index.mark_lookup import HEAD_SUFFIX
from kvatlas.index.protocol import PartitionBatch
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import HolderState, MarksState, unpack_incarnation

ENTRIES_A_CALL = 500
WORKERS_A_PASS = 16
BLOCKS_A_PASS = 200_000
"""Kept in this process during a pass (about 100 bytes each), because a scan may return an entry twice."""
MAX_TOUCHED_BLOCKS = 20_000
"""A worker whose messages touch more blocks during a pass is not followed: they are read again in one call."""

_FOUND = "8sBB"


class Strays(NamedTuple):
    """Blocks of a scope, or fields of its marks, that have an entry of an unknown number."""

    scope_id: bytes
    fields: Sequence[bytes]
    of_marks: bool = False


@dataclass(slots=True)
class WorkerCount:
    """One worker's count, as of `state` (None: no active holder). `went_on`: the worker changed meanwhile, and may be
    followed; `moved`: it changed in a way that can't be followed, and the count is void."""

    worker_id: str
    state: HolderState | None = None
    stored: HolderState | None = None
    """Read last: its digests are what the count is compared with."""
    untiered: bool = False
    """An entry is in no tier."""
    moved: bool = False
    went_on: bool = False
    total: Digest = field(default_factory=Digest)
    total_flags: FlagDigest = field(default_factory=FlagDigest)
    by_scope: dict[bytes, Digest] = field(default_factory=dict)
    found: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    """By scope: hash -> flags."""
    messages: set[tuple[int, int]] = field(default_factory=set)
    touched: dict[bytes, set[bytes]] = field(default_factory=dict)
    """(incarnation, seq) and blocks by scope of the messages that were noted since the pass began."""
    touched_marks: dict[bytes, set[bytes]] = field(default_factory=dict)
    """The same of marks: fields by scope."""
    found_marks: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    """By scope: field -> bits of a head, or nothing of a mark."""
    stored_marks: Sequence[int] = ()
    """Digest of the marks, read last."""
    marks: MarkDigest = field(default_factory=MarkDigest)

    @property
    def wrong(self) -> bool:
        """Do the blocks differ from the digest?"""
        return self.stored is None or not self.sound or self.total.words != list(self.stored.digest)

    @property
    def sound(self) -> bool:
        """See `RecountResult`."""
        if self.stored is None or not self.stored.registered or self.untiered:
            return False
        if self.marks.words != list(self.stored_marks or MarkDigest().words):
            return False
        return self.total_flags.words == list(self.stored.flag_digest)

    def observe(self, state: HolderState | None, *, first: bool) -> None:
        """Take in the worker's state of this moment."""
        if first:
            self.state = state
        before = self.state
        if state is None or before is None or (state.incarnation, state.holder) != (before.incarnation, before.holder):
            self.moved = True
        else:
            self.went_on = self.went_on or state.seq != before.seq
            self.stored = state

    @property
    def scopes(self) -> set[bytes]:
        """Those in which something was found."""
        return self.by_scope.keys() | {scope_id for scope_id, found in self.found_marks.items() if found}

    def observe_marks(self, state: MarksState | None) -> None:
        """Take in the state of the worker's marks of this moment."""
        before = self.state
        if state is None or before is None or (state.incarnation, state.holder) != (before.incarnation, before.holder):
            self.moved = True
        else:
            self.went_on = self.went_on or state.seq != before.seq
            self.stored_marks = state.words or ()

    def note(self, raw: wire.RawMessage) -> None:
        """The message is about to be applied."""
        self.messages.add((raw[wire.INCARNATION], raw[wire.SEQ]))
        for event in raw[wire.EVENTS]:
            if event[wire.CODE] in (wire.STORED, wire.CHUNK, wire.REMOVED):
                hashes = event[wire.HASHES]
                keys = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
                self.touched.setdefault(event[wire.SCOPE_ID], set()).update(keys)
            elif event[wire.CODE] in (wire.MARKED, wire.UNMARKED, wire.HEADS):
                hashes = event[wire.MARK_HASHES]
                suffix = HEAD_SUFFIX if event[wire.CODE] == wire.HEADS else b""
                fields = (hashes[at : at + HASH_BYTES] + suffix for at in range(0, len(hashes), HASH_BYTES))
                self.touched_marks.setdefault(event[wire.SCOPE_ID], set()).update(fields)
        if sum(map(len, [*self.touched.values(), *self.touched_marks.values()])) > MAX_TOUCHED_BLOCKS:
            self.moved = True

    async def catch_up(self, keys: ShardKeys, functions: IndexFunctions) -> None:
        """Follow a worker that went on: what its messages touched is read again, all in one call. Every message in between
        must have been noted."""
        assert self.state is not None
        touched = {scope_id: sorted(hashes) for scope_id, hashes in self.touched.items()}
        noted, before = set(self.messages), self.state
        blocks = [keys.blocks(scope_id) for scope_id in touched]
        args = [self.worker_id, *(b"".join(hashes) for hashes in touched.values())]
        k = [keys.workers, keys.holders, keys.active, keys.digests, *blocks]
        fields, flags_by_scope = msgpack.unpackb(await functions.call_ro("kvatlas_look", k, args), raw=True)
        state = HolderState.of(fields)
        self.observe(state, first=False)
        if state is None or self.moved:
            return
        incarnation = unpack_incarnation(before.incarnation)
        if any((incarnation, seq) not in noted for seq in range(before.seq + 1, state.seq + 1)):
            self.moved = True
            return
        for (scope_id, hashes), flags in zip(touched.items(), flags_by_scope, strict=True):
            found = self.found.setdefault(scope_id, {})
            for key, now in zip(hashes, flags, strict=True):
                if now:
                    found[key] = now
                else:
                    found.pop(key, None)
        self.state = state
        if self.stored_marks or self.touched_marks:
            await self._catch_up_marks(keys, functions)

    async def _catch_up_marks(self, keys: ShardKeys, functions: IndexFunctions) -> None:
        """The same of the marks, in the state that the blocks were read in."""
        assert self.state is not None
        touched = {scope_id: sorted(fields) for scope_id, fields in self.touched_marks.items()}
        k = [keys.workers, keys.marked, *(keys.marks(scope_id) for scope_id in touched)]
        args = [self.worker_id, *(msgpack.packb(fields, use_bin_type=False) for fields in touched.values())]
        fields_, entries_by_scope = msgpack.unpackb(await functions.call_ro("kvatlas_look_marks", k, args), raw=True)
        state = MarksState.of(fields_)
        self.observe_marks(state)
        if state is None or state.seq != self.state.seq:
            self.moved = True
            return
        for (scope_id, fields), entries in zip(touched.items(), entries_by_scope, strict=True):
            found = self.found_marks.setdefault(scope_id, {})
            for name, bits in zip(fields, entries, strict=True):
                if bits is False:
                    found.pop(name, None)
                else:
                    found[name] = bits

    def add_up(self) -> None:
        """Make digests of what was found."""
        for scope_id, found in self.found.items():
            by_tier: dict[Tier, list[bytes]] = {}
            for key, flags in found.items():
                self.untiered = self.untiered or not flags & TIER_MASK
                self.total_flags.add(scope_id, flags, key)
                for tier in tiers_of(flags):
                    by_tier.setdefault(tier, []).append(key)
            for tier, hashes in by_tier.items():
                self.total.add(scope_id, tier, b"".join(hashes))
                self.by_scope.setdefault(scope_id, Digest()).add(scope_id, tier, b"".join(hashes))
        self.found = {}
        for scope_id, found_marks in self.found_marks.items():
            self.marks.add_marks(scope_id, b"".join(name for name in found_marks if len(name) == HASH_BYTES))
            for name, bits in found_marks.items():
                if len(name) > HASH_BYTES:
                    self.marks.add_head(scope_id, name[:HASH_BYTES], int.from_bytes(bits, "big"))


class Recount:
    """One pass for at most WORKERS_A_PASS workers of one shard: `part` until `ended`, then `finish`; or `complete`.

    A scan returns each entry that is there all the while, some twice, and any of those that come or go. So what a worker's
    messages touched meanwhile is read again at the end, provided that all of them were noted.
    """

    def __init__(self, keys: ShardKeys, worker_ids: Sequence[str], scope_ids: Sequence[bytes]) -> None:
        """`scope_ids`: every scope known, also those that the workers are not known to use."""
        self._counts = {worker_id: WorkerCount(worker_id) for worker_id in worker_ids}
        self._keys = keys
        self._scope_ids = sorted(scope_ids)
        self._marks_of = list(self._scope_ids)
        """Scopes whose marks are not read yet; that begins after all blocks."""
        self._cursor: int | bytes = 0
        self._first = True

    @property
    def ended(self) -> bool:
        return not self._scope_ids and not self._marks_of

    def note(self, batches: Sequence[PartitionBatch]) -> None:
        """These messages are about to be applied."""
        for batch in batches:
            for raw in batch.messages:
                one = self._counts.get(raw[wire.WORKER_ID])
                if one is not None and not one.moved:
                    one.note(raw)

    async def part(self, functions: IndexFunctions) -> Strays:
        """Count a part of one scope. Returns what has an entry of an unknown number there."""
        if not self._scope_ids:
            return await self._part_of_marks(functions)
        k, scope_id = self._keys, self._scope_ids[-1]
        keys = [k.blocks(scope_id), k.workers, k.holders, k.active, k.digests, k.marked]
        counts = list(self._counts.values())
        packed = await functions.call_ro("kvatlas_scrub", keys, [self._cursor, ENTRIES_A_CALL, *self._counts])
        self._cursor, states, found, strays = msgpack.unpackb(packed, raw=True)
        for one, state in zip(counts, states, strict=True):
            one.observe(HolderState.of(state), first=self._first)
        self._first = False
        for key, at, flags in iter_unpack(_FOUND, found):
            counts[at].found.setdefault(scope_id, {})[key] = flags
        if int(self._cursor) == 0:
            self._scope_ids.pop()
            if not self._scope_ids and not any(one.state is not None and one.state.marked for one in counts):
                self._marks_of.clear()
        return Strays(scope_id, strays)

    async def _part_of_marks(self, functions: IndexFunctions) -> Strays:
        k, scope_id = self._keys, self._marks_of[-1]
        keys = [k.marks(scope_id), k.workers, k.holders, k.marked]
        counts = list(self._counts.values())
        packed = await functions.call_ro("kvatlas_scrub_marks", keys, [self._cursor, ENTRIES_A_CALL, *self._counts])
        self._cursor, states, found, strays = msgpack.unpackb(packed, raw=True)
        for one, state in zip(counts, states, strict=True):
            if one.state is not None:
                one.observe_marks(MarksState.of(state))
        for name, at, bits in zip(found[::3], found[1::3], found[2::3], strict=True):
            counts[at].found_marks.setdefault(scope_id, {})[name] = bits
        if int(self._cursor) == 0:
            self._marks_of.pop()
        return Strays(scope_id, strays, of_marks=True)

    async def finish(self, functions: IndexFunctions) -> list[WorkerCount]:
        """Follow the workers that went on, and return every worker's count."""
        for one in self._counts.values():
            if one.went_on and not one.moved:
                await one.catch_up(self._keys, functions)
            one.add_up()
        return list(self._counts.values())

    async def complete(self, functions: IndexFunctions) -> list[WorkerCount]:
        """The whole pass at once."""
        while not self.ended:
            await self.part(functions)
        return await self.finish(functions)
