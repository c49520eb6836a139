"""Recounting what some workers hold, from the blocks themselves: one pass over every scope of a shard."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any

import msgpack

from kvatlas.digest import Digest
from kvatlas.index.keys import ShardKeys
from kvatlas.tiers import Tier, tiers_of

ENTRIES_A_CALL = 500
WORKERS_A_PASS = 16
BLOCKS_A_PASS = 200_000
"""Held in this process while one scope is counted (about 100 bytes each), because a scan may say an entry twice."""

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]
State = tuple[bytes, int, bytes]
"""(incarnation, seq, active holder): while it is the same, nobody changed what the worker holds."""

_FOUND = "8sBB"


@dataclass(slots=True)
class Counted:
    """One worker. `state`: when the pass began, None without an active holder; `moved`: it went on meanwhile, and the count
    says nothing. `digest` is the stored one, `said` whether the holder's own entries are right."""

    worker_id: str
    state: State | None = None
    digest: Sequence[int] = ()
    said: bool = True
    moved: bool = False
    total: Digest = field(default_factory=Digest)
    by_scope: dict[bytes, Digest] = field(default_factory=dict)
    found: dict[bytes, int] = field(default_factory=dict)
    """Of the scope that is counted now: hash -> flags."""

    @property
    def wrong(self) -> bool:
        return not self.said or self.total.words != list(self.digest)

    def see(self, state: Sequence[Any], *, first: bool) -> None:
        now = (state[0], state[1], state[2]) if state else None
        if first:
            self.state = now
        self.moved = self.moved or now is None or now != self.state
        if state:
            self.digest, self.said = state[3], bool(state[4])

    def end_scope(self, scope_id: bytes) -> None:
        by_tier: dict[Tier, list[bytes]] = {}
        for key, flags in self.found.items():
            for tier in tiers_of(flags):
                by_tier.setdefault(tier, []).append(key)
        for tier, hashes in by_tier.items():
            self.total.add(scope_id, tier, b"".join(hashes))
            self.by_scope.setdefault(scope_id, Digest()).add(scope_id, tier, b"".join(hashes))
        self.found = {}


class Recount:
    """One pass for at most WORKERS_A_PASS workers of one shard; `part` until `ended`."""

    def __init__(self, keys: ShardKeys, worker_ids: Sequence[str], scope_ids: Sequence[bytes]) -> None:
        """`scope_ids`: every scope known, also those that the workers never said they use."""
        self.counted = [Counted(worker_id) for worker_id in worker_ids]
        self._keys = keys
        self._scope_ids = sorted(scope_ids)
        self._cursor: int | bytes = 0
        self._first = True

    @property
    def ended(self) -> bool:
        return not self._scope_ids

    async def part(self, call_ro: Call) -> tuple[bytes, list[bytes]]:
        """A part of one scope; that scope, and its blocks that have an entry of a number that is nobody's."""
        k, scope_id = self._keys, self._scope_ids[-1]
        keys = [k.blocks(scope_id), k.workers, k.holders, k.active, k.digests]
        workers = [one.worker_id for one in self.counted]
        packed = await call_ro("kvatlas_scrub", keys, [self._cursor, ENTRIES_A_CALL, *workers])
        self._cursor, states, found, strays = msgpack.unpackb(packed, raw=True)
        for one, state in zip(self.counted, states, strict=True):
            one.see(state or (), first=self._first)
        self._first = False
        for key, at, flags in iter_unpack(_FOUND, found):
            self.counted[at].found[key] = flags
        if int(self._cursor) == 0:
            for one in self.counted:
                one.end_scope(scope_id)
            self._scope_ids.pop()
        return scope_id, strays
