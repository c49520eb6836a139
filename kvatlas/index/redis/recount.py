"""Recounting what some workers hold, from the blocks themselves: one pass over every scope of a shard."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any

import msgpack

from kvatlas.blocks.digest import FLAG_WORDS, WORDS, Digest, FlagDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import TIER_MASK, Tier, tiers_of
from kvatlas.bus import wire
from kvatlas.index.protocol import PartitionBatch
from kvatlas.index.redis.keys import ShardKeys

ENTRIES_A_CALL = 500
WORKERS_A_PASS = 16
BLOCKS_A_PASS = 200_000
"""Held in this process during a pass (about 100 bytes each), because a scan may say an entry twice."""
MOST_TOUCHED = 20_000
"""Blocks that a worker may touch during a pass and still be followed: they are looked at again in one call."""

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]
State = tuple[bytes, int, bytes]
"""(incarnation, seq, active holder)."""

_FOUND = "8sBB"


@dataclass(slots=True)
class Counted:
    """One worker. `state`: when the pass began, None without an active holder; `moved`: it went on meanwhile in a way that
    can't be followed, and the count says nothing. `digest` is the stored one, `said` whether the holder's own entries are
    right, `flags` the stored digest of the flags besides tiers."""

    worker_id: str
    state: State | None = None
    digest: Sequence[int] = ()
    said: bool = True
    flags: Sequence[int] = ()
    strange: bool = False
    """An entry is in no tier."""
    moved: bool = False
    went_on: bool = False
    total: Digest = field(default_factory=Digest)
    total_flags: FlagDigest = field(default_factory=FlagDigest)
    by_scope: dict[bytes, Digest] = field(default_factory=dict)
    found: dict[bytes, dict[bytes, int]] = field(default_factory=dict)
    """By scope: hash -> flags."""
    told: set[tuple[int, int]] = field(default_factory=set)
    touched: dict[bytes, set[bytes]] = field(default_factory=dict)
    """(incarnation, seq) and blocks of the messages that were noticed since the pass began."""

    @property
    def wrong(self) -> bool:
        return not self.sound or self.total.words != list(self.digest)

    @property
    def sound(self) -> bool:
        """See `Recounted`."""
        return self.said and not self.strange and self.total_flags.words == list(self.flags)

    def see(self, state: Sequence[Any], *, first: bool) -> None:
        now = (state[0], state[1], state[2]) if state else None
        if first:
            self.state = now
        if now is None or self.state is None or (now[0], now[2]) != (self.state[0], self.state[2]):
            self.moved = True
        else:
            self.went_on = self.went_on or now[1] != self.state[1]
            self.digest, self.said = state[3][:WORDS], bool(state[4])
            self.flags = state[3][WORDS:] or [0] * FLAG_WORDS

    def notice(self, raw: wire.RawMessage) -> None:
        self.told.add((raw[wire.INCARNATION], raw[wire.SEQ]))
        for event in raw[wire.EVENTS]:
            if event[wire.CODE] in (wire.STORED, wire.CHUNK, wire.REMOVED):
                hashes = event[wire.HASHES]
                keys = (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
                self.touched.setdefault(event[wire.SCOPE_ID], set()).update(keys)
        if sum(map(len, self.touched.values())) > MOST_TOUCHED:
            self.moved = True

    async def catch_up(self, keys: ShardKeys, call_ro: Call) -> None:
        """It went on: what its messages touched is looked at again, all in one call, and they must be all there were."""
        assert self.state is not None
        touched, told = {scope_id: sorted(hashes) for scope_id, hashes in self.touched.items()}, set(self.told)
        blocks = [keys.blocks(scope_id) for scope_id in touched]
        args = [self.worker_id, *(b"".join(hashes) for hashes in touched.values())]
        k = [keys.workers, keys.holders, keys.active, keys.digests, *blocks]
        state, flags = msgpack.unpackb(await call_ro("kvatlas_look", k, args), raw=True)
        before = self.state
        self.see(state or (), first=False)
        incarnation = int.from_bytes(before[0], "big")
        if self.moved or any((incarnation, seq) not in told for seq in range(before[1] + 1, state[1] + 1)):
            self.moved = True
            return
        for (scope_id, hashes), now in zip(touched.items(), flags, strict=True):
            found = self.found.setdefault(scope_id, {})
            for key, held in zip(hashes, now, strict=True):
                if held:
                    found[key] = held
                else:
                    found.pop(key, None)
        self.state = (state[0], state[1], state[2])

    def add_up(self) -> None:
        """Digests of what was found."""
        for scope_id, found in self.found.items():
            by_tier: dict[Tier, list[bytes]] = {}
            for key, flags in found.items():
                self.strange = self.strange or not flags & TIER_MASK
                self.total_flags.add(scope_id, flags, key)
                for tier in tiers_of(flags):
                    by_tier.setdefault(tier, []).append(key)
            for tier, hashes in by_tier.items():
                self.total.add(scope_id, tier, b"".join(hashes))
                self.by_scope.setdefault(scope_id, Digest()).add(scope_id, tier, b"".join(hashes))
        self.found = {}


class Recount:
    """One pass for at most WORKERS_A_PASS workers of one shard: `part` until `ended`, then `finish`.

    A scan says each entry that is there all the while, some twice, and of those that come or go what it likes. So what a
    worker's messages touched meanwhile is looked at again at the end, where all of them were noticed.
    """

    def __init__(self, keys: ShardKeys, worker_ids: Sequence[str], scope_ids: Sequence[bytes]) -> None:
        """`scope_ids`: every scope known, also those that the workers never said they use."""
        self._counted = {worker_id: Counted(worker_id) for worker_id in worker_ids}
        self._keys = keys
        self._scope_ids = sorted(scope_ids)
        self._cursor: int | bytes = 0
        self._first = True

    @property
    def ended(self) -> bool:
        return not self._scope_ids

    def notice(self, batches: Sequence[PartitionBatch]) -> None:
        """These messages are about to be applied."""
        for batch in batches:
            for raw in batch.messages:
                one = self._counted.get(raw[wire.WORKER_ID])
                if one is not None and not one.moved:
                    one.notice(raw)

    async def part(self, call_ro: Call) -> tuple[bytes, list[bytes]]:
        """A part of one scope; that scope, and its blocks that have an entry of a number that is nobody's."""
        k, scope_id = self._keys, self._scope_ids[-1]
        keys = [k.blocks(scope_id), k.workers, k.holders, k.active, k.digests]
        counted = list(self._counted.values())
        packed = await call_ro("kvatlas_scrub", keys, [self._cursor, ENTRIES_A_CALL, *self._counted])
        self._cursor, states, found, strays = msgpack.unpackb(packed, raw=True)
        for one, state in zip(counted, states, strict=True):
            one.see(state or (), first=self._first)
        self._first = False
        for key, at, flags in iter_unpack(_FOUND, found):
            counted[at].found.setdefault(scope_id, {})[key] = flags
        if int(self._cursor) == 0:
            self._scope_ids.pop()
        return scope_id, strays

    async def finish(self, call_ro: Call) -> list[Counted]:
        """What was counted."""
        for one in self._counted.values():
            if one.went_on and not one.moved:
                await one.catch_up(self._keys, call_ro)
            one.add_up()
        return list(self._counted.values())
