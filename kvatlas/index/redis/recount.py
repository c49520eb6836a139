"""Counts what some workers hold from the blocks themselves, in one pass over all scopes of a shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any, NamedTuple

import msgpack

from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier, are_tiers, tiers_of
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.identity import SCOPE_ID_BYTES, Scope
from kvatlas.index.mark_lookup import HEAD_SUFFIX
from kvatlas.index.redis.call_plan import HASHES_AT, WITH_HASHES
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import HolderState, unpack_incarnation

CALL_COST = 350
"""Maximum work of a call (`functions/scrub.lua`), in units that take the store three microseconds each, whatever the values
are."""
LOOK_BLOCKS = 300
LOOK_ROUNDS = 10
WORKERS_A_PASS = 16
BLOCKS_A_PASS = 200_000
"""Maximum number of blocks that are kept in this process during a pass (about 100 bytes each). They are kept because a scan may
return an entry twice."""
MAX_TOUCHED_BLOCKS = 20_000
"""If a worker's messages touch more blocks than this during a pass, we do not try to keep up with the worker."""

_FOUND = "8sBB"


@dataclass(frozen=True, slots=True)
class RecountResult:
    """What a worker holds, counted from the blocks themselves: the digest words of its active holder, by scope.

    The result is as of (incarnation, seq). `moved`: the worker changed during the count, which is therefore void. `sound`:
    every entry has at least one tier and no other flags, and its holder is registered as the worker's. `marks`: the digest
    words of its marks; empty if there are none.
    """

    worker_id: str
    incarnation: int
    seq: int
    moved: bool
    scopes: Mapping[Scope, Sequence[int]]
    sound: bool = True
    marks: Sequence[int] = ()


class Strays(NamedTuple):
    """Blocks of a scope, or fields of its marks, that have an entry with an unknown holder number."""

    scope_id: bytes
    fields: Sequence[bytes]
    of_marks: bool = False


_Touched = dict[tuple[bytes, bool], set[bytes]]
"""By (scope, whether it is about marks): fields of marks if True, hashes of blocks if False."""


@dataclass(slots=True)
class WorkerCount:
    """The count of one worker, as of `state` (None: it has no active holder). `went_on`: the worker changed in the meantime,
    but the count may still catch up with it; `moved`: it changed in a way that can't be caught up with, so the count is
    void."""

    worker_id: str
    state: HolderState | None = None
    stored: HolderState | None = None
    """The state that was read last; the count is compared with the digests in it."""
    malformed: bool = False
    """An entry has flags that are not tiers."""
    moved: bool = False
    went_on: bool = False
    total: Digest = field(default_factory=Digest)
    by_scope: dict[bytes, Digest] = field(default_factory=dict)
    found: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    """By scope: hash -> flags."""
    messages: dict[tuple[int, int], list[tuple[int, bytes, bytes]]] = field(default_factory=dict)
    """Messages noted since the pass began: (code, scope, packed hashes) for each event, by (incarnation, seq)."""
    touched_blocks: int = 0
    """The number of hashes in these messages."""
    found_marks: dict[bytes, dict[bytes, bytes]] = field(default_factory=dict)
    """By scope: field -> bits of a head, or empty for a mark."""
    marks: MarkDigest = field(default_factory=MarkDigest)

    @property
    def wrong(self) -> bool:
        """True if the blocks differ from the digest."""
        return self.stored is None or not self.sound or self.total.words != list(self.stored.digest)

    @property
    def sound(self) -> bool:
        """See `RecountResult`."""
        if self.stored is None or not self.stored.registered or self.malformed:
            return False
        return self.marks.words == list(self.stored.marks or MarkDigest().words)

    def observe(self, state: HolderState | None, *, first: bool) -> None:
        """Update the count with the worker's current state."""
        if first:
            self.state = state
        before = self.state
        if state is None or before is None or (state.incarnation, state.holder) != (before.incarnation, before.holder):
            self.moved = True
        else:
            self.went_on = self.went_on or state.moment != before.moment
            self.stored = state

    @property
    def scopes(self) -> set[bytes]:
        """The scopes in which something was found."""
        return self.by_scope.keys() | {scope_id for scope_id, found in self.found_marks.items() if found}

    def note(self, raw: wire.RawMessage) -> None:
        """Note a message that is about to be applied."""
        events = [event for event in raw[wire.EVENTS] if event[wire.CODE] in HASHES_AT]
        touched = [(event[wire.CODE], event[wire.SCOPE_ID], event[HASHES_AT[event[wire.CODE]]]) for event in events]
        self.messages[raw[wire.INCARNATION], raw[wire.SEQ]] = touched
        self.touched_blocks += sum(len(hashes) for _, _, hashes in touched) // HASH_BYTES
        if self.touched_blocks > MAX_TOUCHED_BLOCKS:
            self.moved = True

    async def catch_up(self, keys: ShardKeys, functions: IndexFunctions, server: bytes) -> None:
        """Catch up with a worker that changed in the meantime: read what its messages touched again, until no further message
        arrives. Every message in between must have been noted, and the store must still be this server."""
        assert self.state is not None
        incarnation, read_seq = unpack_incarnation(self.state.incarnation), self.state.seq
        for _ in range(LOOK_ROUNDS):
            noted_seq, touched = self._noted_after(incarnation, read_seq)
            moments = [await self._look(keys, functions, server, *part) for part in _in_parts(touched)]
            if self.moved:
                return
            first, last = moments[0], moments[-1]
            if first == last and last[0] + (last[1] > 0) <= noted_seq:
                return
            if noted_seq == read_seq:  # a message was not noted
                break
            read_seq = min(first[0], noted_seq)
        self.moved = True

    def _noted_after(self, incarnation: int, seq: int) -> tuple[int, _Touched]:
        """The last of those messages after seq that were noted without a gap, and what these messages touch."""
        touched: _Touched = {}
        while (events := self.messages.get((incarnation, seq + 1))) is not None:
            seq += 1
            for code, scope_id, hashes in events:
                suffix = HEAD_SUFFIX if code == wire.HEADS else b""
                fields = (hashes[at : at + HASH_BYTES] + suffix for at in range(0, len(hashes), HASH_BYTES))
                touched.setdefault((scope_id, code not in WITH_HASHES), set()).update(fields)
        return seq, touched

    async def _look(
        self,
        keys: ShardKeys,
        functions: IndexFunctions,
        server: bytes,
        scope_id: bytes,
        of_marks: bool,
        fields: Sequence[bytes],
    ) -> tuple[int, int]:
        """Read some blocks or marks again. Returns the worker's moment at that time; the worker has `moved` if the count can't
        catch up with it."""
        function, key, packed, missing = "kvatlas_look", keys.blocks(scope_id), b"".join(fields), 0
        if of_marks:
            function, key, missing = "kvatlas_look_marks", keys.marks(scope_id), False
            packed = msgpack.packb(fields, use_bin_type=False)
        answer = await functions.call_ro(function, [*keys.of_state, key], [self.worker_id, packed])
        now_on, state_fields, (entries,) = msgpack.unpackb(answer, raw=True)
        state = HolderState.of(state_fields)
        self.observe(state, first=False)
        self.moved = self.moved or now_on != server
        if state is None:
            return -1, 0
        self.state = state
        found: dict[bytes, Any] = (self.found_marks if of_marks else self.found).setdefault(scope_id, {})
        for name, entry in zip(fields, entries, strict=True):
            if entry == missing:
                found.pop(name, None)
            else:
                found[name] = entry
        return state.moment

    def add_up(self) -> None:
        """Compute the digests of what was found."""
        for scope_id, found in self.found.items():
            by_tier: dict[Tier, list[bytes]] = {}
            for key, flags in found.items():
                self.malformed = self.malformed or not are_tiers(flags)
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


def _in_parts(touched: _Touched) -> list[tuple[bytes, bool, list[bytes]]]:
    """(scope, whether they are marks, fields) for each call that reads them again; at least one call, because it also reads the
    digests."""
    parts = [
        (scope_id, of_marks, ordered[at : at + LOOK_BLOCKS])
        for (scope_id, of_marks), fields in touched.items()
        for ordered in [sorted(fields)]
        for at in range(0, len(ordered), LOOK_BLOCKS)
    ]
    return parts or [(bytes(SCOPE_ID_BYTES), False, [])]


class Recount:
    """One pass for at most WORKERS_A_PASS workers of one shard. Either call `part` until `ended`, then `finish`; or just call
    `complete`.

    A scan returns every entry that exists throughout, some of them twice, and perhaps entries that appear or disappear in the
    meantime. Entries that a worker's messages touched are therefore read again at the end, provided that all of these messages
    were noted.
    """

    def __init__(self, keys: ShardKeys, worker_ids: Sequence[str], scope_ids: Sequence[bytes]) -> None:
        """`scope_ids`: every known scope, even if the workers are not known to use it. If there are none, the workers' states
        are read all the same."""
        self._counts = {worker_id: WorkerCount(worker_id) for worker_id in worker_ids}
        self._keys = keys
        self._scope_ids = sorted(scope_ids) or [bytes(SCOPE_ID_BYTES)]
        self._marks_of = list(self._scope_ids)
        """Scopes whose marks have not been read yet; they are read after all blocks."""
        self._cursor: int | bytes = 0
        self._first = True
        self.server = b""
        """The server on which the pass began."""

    @property
    def ended(self) -> bool:
        return not self._scope_ids and not self._marks_of

    def note(self, batches: Sequence[PartitionBatch]) -> None:
        """Note messages that are about to be applied."""
        for batch in batches:
            for raw in batch.messages:
                one = self._counts.get(raw[wire.WORKER_ID])
                if one is not None and not one.moved:
                    one.note(raw)

    async def part(self, functions: IndexFunctions) -> tuple[Strays, int]:
        """Count a part of one scope. Returns the entries with unknown holder numbers that were found there, and the cost of the
        call. If the store failed over, the pass ends, and every worker has `moved`."""
        of_marks, k = not self._scope_ids, self._keys
        scopes = self._marks_of if of_marks else self._scope_ids
        scope_id, counts = scopes[-1], list(self._counts.values())
        function, key = ("kvatlas_scrub_marks", k.marks) if of_marks else ("kvatlas_scrub", k.blocks)
        args = [self.server, self._cursor, CALL_COST, *self._counts]
        answer = await functions.call_ro(function, [key(scope_id), *k.of_state], args)
        self.server, *part = msgpack.unpackb(answer, raw=True)
        if not part:
            self._scope_ids.clear()
            self._marks_of.clear()
            for one in counts:
                one.moved = True
            return Strays(scope_id, []), CALL_COST
        self._cursor, cost, states, found, strays = part
        for one, state in zip(counts, states, strict=True):
            one.observe(HolderState.of(state), first=self._first)
        self._first = False
        if of_marks:
            for name, at, bits in zip(found[::3], found[1::3], found[2::3], strict=True):
                counts[at].found_marks.setdefault(scope_id, {})[name] = bits
        else:
            for name, at, flags in iter_unpack(_FOUND, found):
                counts[at].found.setdefault(scope_id, {})[name] = flags
        if int(self._cursor) == 0:
            scopes.pop()
            if not self._scope_ids and not any(one.state is not None and one.state.marks for one in counts):
                self._marks_of.clear()
        return Strays(scope_id, strays, of_marks), cost

    async def finish(self, functions: IndexFunctions) -> list[WorkerCount]:
        """Catch up with the workers that changed in the meantime, and return every worker's count."""
        for one in self._counts.values():
            if one.went_on and not one.moved:
                await one.catch_up(self._keys, functions, self.server)
            one.add_up()
        return list(self._counts.values())

    async def complete(self, functions: IndexFunctions) -> list[WorkerCount]:
        """Do the whole pass in one go."""
        while not self.ended:
            await self.part(functions)
        return await self.finish(functions)
