"""Counting what some workers hold from the blocks themselves: one pass over every scope of a shard."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack

import msgpack

from kvatlas.blocks.digest import Digest, FlagDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import TIER_MASK, Tier, tiers_of
from kvatlas.bus import wire
from kvatlas.identity import SCOPE_ID_BYTES
from kvatlas.index.protocol import PartitionBatch
from kvatlas.index.redis.call_plan import WITH_HASHES
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import HolderState, unpack_incarnation

CALL_COST = 300
"""Of what a call looks at (`functions/scrub.lua`); about a microsecond of the store each."""
LOOK_BLOCKS = 300
LOOK_ROUNDS = 10
WORKERS_A_PASS = 16
BLOCKS_A_PASS = 200_000
"""Kept in this process during a pass (about 100 bytes each), because a scan may return an entry twice."""
MAX_TOUCHED_BLOCKS = 20_000
"""A worker whose messages touch more blocks during a pass is not followed."""

_FOUND = "8sBB"


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
    messages: dict[tuple[int, int], list[tuple[bytes, bytes]]] = field(default_factory=dict)
    """The messages that were noted since the pass began: (scope, packed hashes) of each event, by (incarnation, seq)."""
    touched_blocks: int = 0
    """How many hashes they have."""

    @property
    def wrong(self) -> bool:
        """Do the blocks differ from the digest?"""
        return self.stored is None or not self.sound or self.total.words != list(self.stored.digest)

    @property
    def sound(self) -> bool:
        """See `RecountResult`."""
        if self.stored is None or not self.stored.registered or self.untiered:
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
            self.went_on = self.went_on or state.moment != before.moment
            self.stored = state

    def note(self, raw: wire.RawMessage) -> None:
        """The message is about to be applied."""
        touched = [
            (event[wire.SCOPE_ID], event[wire.HASHES]) for event in raw[wire.EVENTS] if event[wire.CODE] in WITH_HASHES
        ]
        self.messages[raw[wire.INCARNATION], raw[wire.SEQ]] = touched
        self.touched_blocks += sum(len(hashes) for _, hashes in touched) // HASH_BYTES
        if self.touched_blocks > MAX_TOUCHED_BLOCKS:
            self.moved = True

    async def catch_up(self, keys: ShardKeys, functions: IndexFunctions, server: bytes) -> None:
        """Follow a worker that went on: what its messages touched is read again, until no message came while it was. Every
        message in between must have been noted, and the store must still be this server."""
        assert self.state is not None
        incarnation, read_seq = unpack_incarnation(self.state.incarnation), self.state.seq
        for _ in range(LOOK_ROUNDS):
            noted_seq, touched = self._noted_after(incarnation, read_seq)
            states = [
                await self._look(keys, functions, server, scope_id, hashes) for scope_id, hashes in _in_parts(touched)
            ]
            first, last = states[0], states[-1]
            if first is None or last is None or self.moved:
                self.moved = True
                return
            if first.moment == last.moment and last.begun_seq <= noted_seq:
                self.state = last
                return
            if noted_seq == read_seq:  # a message was not noted
                break
            read_seq = min(first.seq, noted_seq)
        self.moved = True

    def _noted_after(self, incarnation: int, seq: int) -> tuple[int, dict[bytes, set[bytes]]]:
        """The last of the messages after seq that were noted without a gap, and what these touch."""
        touched: dict[bytes, set[bytes]] = {}
        while (events := self.messages.get((incarnation, seq + 1))) is not None:
            seq += 1
            for scope_id, hashes in events:
                keys = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
                touched.setdefault(scope_id, set()).update(keys)
        return seq, touched

    async def _look(
        self, keys: ShardKeys, functions: IndexFunctions, server: bytes, scope_id: bytes, hashes: Sequence[bytes]
    ) -> HolderState | None:
        """Read some blocks again, and the worker's state at that moment."""
        k = [keys.workers, keys.holders, keys.active, keys.digests, keys.steps, keys.blocks(scope_id)]
        packed = await functions.call_ro("kvatlas_look", k, [self.worker_id, b"".join(hashes)])
        now_on, fields, (flags,) = msgpack.unpackb(packed, raw=True)
        state = HolderState.of(fields)
        self.moved = self.moved or now_on != server
        self.observe(state, first=False)
        found = self.found.setdefault(scope_id, {})
        for key, now in zip(hashes, flags, strict=True):
            if now:
                found[key] = now
            else:
                found.pop(key, None)
        return state

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


def _in_parts(touched: Mapping[bytes, Collection[bytes]]) -> list[tuple[bytes, list[bytes]]]:
    """(scope, hashes) of each call that looks at them; one without hashes, for the worker's state, if there are none."""
    parts = []
    for scope_id, hashes in touched.items():
        ordered = sorted(hashes)
        parts += [(scope_id, ordered[at : at + LOOK_BLOCKS]) for at in range(0, len(ordered), LOOK_BLOCKS)]
    return parts or [(bytes(SCOPE_ID_BYTES), [])]


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
        self._cursor: int | bytes = 0
        self._first = True
        self.server = b""
        """The server on which it began."""

    @property
    def ended(self) -> bool:
        return not self._scope_ids

    def note(self, batches: Sequence[PartitionBatch]) -> None:
        """These messages are about to be applied."""
        for batch in batches:
            for raw in batch.messages:
                one = self._counts.get(raw[wire.WORKER_ID])
                if one is not None and not one.moved:
                    one.note(raw)

    async def part(self, functions: IndexFunctions) -> tuple[bytes, list[bytes], int]:
        """Count a part of one scope. Returns that scope, its blocks that have an entry of an unknown number, and what the
        call cost. If the store failed over, the pass ends: every worker `moved`."""
        k, scope_id = self._keys, self._scope_ids[-1]
        keys = [k.blocks(scope_id), k.workers, k.holders, k.active, k.digests, k.steps]
        counts = list(self._counts.values())
        args = [self.server, self._cursor, CALL_COST, *self._counts]
        self.server, *part = msgpack.unpackb(await functions.call_ro("kvatlas_scrub", keys, args), raw=True)
        if not part:
            self._scope_ids.clear()
            for one in counts:
                one.moved = True
            return scope_id, [], CALL_COST
        self._cursor, cost, states, found, strays = part
        for one, state in zip(counts, states, strict=True):
            one.observe(HolderState.of(state), first=self._first)
        self._first = False
        for key, at, flags in iter_unpack(_FOUND, found):
            counts[at].found.setdefault(scope_id, {})[key] = flags
        if int(self._cursor) == 0:
            self._scope_ids.pop()
        return scope_id, strays, cost

    async def finish(self, functions: IndexFunctions) -> list[WorkerCount]:
        """Follow the workers that went on, and return every worker's count."""
        for one in self._counts.values():
            if one.went_on and not one.moved:
                await one.catch_up(self._keys, functions, self.server)
            one.add_up()
        return list(self._counts.values())

    async def complete(self, functions: IndexFunctions) -> list[WorkerCount]:
        """The whole pass at once."""
        while not self.ended:
            await self.part(functions)
        return await self.finish(functions)
