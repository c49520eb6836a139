"""Recounting what holders hold against their digests: finds damage that no message did."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import iter_unpack
from typing import Any

import msgpack

from kvatlas.digest import Digest
from kvatlas.index.keys import ShardKeys
from kvatlas.index.protocol import Scrubbed
from kvatlas.tiers import Tier, tiers_of

WORKERS_A_PASS = 16
BLOCKS_A_PASS = 200_000
"""Held in this process while one scope is counted (about 100 bytes each), because a scan may say an entry twice."""
ENTRIES_A_CALL = 500
TRIES = 3

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]
State = tuple[bytes, int, bytes]
"""(incarnation, seq, active holder): while it is the same, nobody changed what the worker holds."""

_FOUND = "8sBB"


@dataclass(slots=True)
class _Counted:
    """One worker in the pass that goes on."""

    worker_id: str
    tries: int
    seen: bool = False
    state: State | None = None
    digest: Sequence[int] = ()
    said: bool = True
    moved: bool = False
    counted: Digest = field(default_factory=Digest)
    scopes: list[bytes] = field(default_factory=list)
    found: dict[bytes, int] = field(default_factory=dict)
    """Of the scope that is counted now: hash -> flags."""

    def see(self, state: Sequence[Any]) -> None:
        now = (state[0], state[1], state[2]) if state else None
        if not self.seen:
            self.seen, self.state = True, now
        self.moved = self.moved or now is None or now != self.state
        if state:
            self.digest, self.said = state[3], bool(state[4])

    def end_scope(self, scope_id: bytes) -> None:
        if self.found:
            self.scopes.append(scope_id)
        by_tier: dict[Tier, list[bytes]] = {}
        for key, flags in self.found.items():
            for tier in tiers_of(flags):
                by_tier.setdefault(tier, []).append(key)
        for tier, hashes in by_tier.items():
            self.counted.add(scope_id, tier, b"".join(hashes))
        self.found = {}


class Scrub:
    """The place where one shard's scrub stands: some workers at a time, scope by scope, a part of a scope a call.

    A worker whose record moves while it is counted can't be compared: it is counted again, then without pauses, TRIES times
    in all. (A worker that never rests is held against its own checkpoints.)
    """

    def __init__(self, keys: ShardKeys, side_index: bool) -> None:
        self._keys = keys
        self._side_index = side_index
        self._queue: list[tuple[str, int, int]] = []
        """(worker, tries so far, blocks)"""
        self._pass: list[_Counted] = []
        self._scopes: list[bytes] = []
        self._cursor: int | bytes = 0

    async def run(
        self,
        call: Call,
        call_ro: Call,
        list_workers: Callable[[], Awaitable[Sequence[tuple[str, int]]]],
        list_scopes: Callable[[], Awaitable[Sequence[bytes]]],
        budget_entries: int,
    ) -> Scrubbed:
        """Go on for about `budget_entries` looked-at entries. `list_workers`: those with an active holder and how many
        blocks its digest says; `list_scopes`: every scope known."""
        if not self._pass and not self._queue:
            self._queue = [(worker_id, 0, blocks) for worker_id, blocks in await list_workers()]
        checked = strays = given_up = 0
        damaged: list[str] = []
        while self._pass or self._queue:
            if not self._pass:
                self._pass = list(self._next_pass())
                self._scopes, self._cursor = sorted(await list_scopes()), 0
            while self._scopes:
                strays += await self._count_part(call, call_ro)
                budget_entries -= ENTRIES_A_CALL
                if budget_entries <= 0 and not any(one.tries for one in self._pass):
                    return Scrubbed(checked, damaged, strays, given_up, False)
            ended, self._pass = self._pass, []
            for one in ended:
                if one.state is None:
                    continue  # gone, or never answering
                if one.moved or (self._is_wrong(one) and not await self._doubt(one, call)):
                    if one.tries + 1 < TRIES:
                        self._queue.append((one.worker_id, one.tries + 1, BLOCKS_A_PASS))  # alone
                    else:
                        given_up += 1
                    continue
                checked += 1
                if self._is_wrong(one):
                    damaged.append(one.worker_id)
        return Scrubbed(checked, damaged, strays, given_up, True)

    def _next_pass(self) -> Iterator[_Counted]:
        room = BLOCKS_A_PASS
        for _ in range(min(len(self._queue), WORKERS_A_PASS)):
            worker_id, tries, blocks = self._queue[0]
            if room < BLOCKS_A_PASS and blocks > room:
                return
            room -= max(blocks, 1)
            del self._queue[0]
            yield _Counted(worker_id, tries)

    async def _count_part(self, call: Call, call_ro: Call) -> int:
        """One part of the current scope; entries of nobody that were taken out."""
        k, scope_id = self._keys, self._scopes[-1]
        keys = [k.blocks(scope_id), k.workers, k.holders, k.active, k.digests]
        workers = [one.worker_id for one in self._pass]
        packed = await call_ro("kvatlas_scrub", keys, [self._cursor, ENTRIES_A_CALL, *workers])
        self._cursor, states, found, stray = msgpack.unpackb(packed, raw=True)
        for one, state in zip(self._pass, states, strict=True):
            one.see(state or ())
        for key, at, flags in iter_unpack(_FOUND, found):
            self._pass[at].found[key] = flags
        if int(self._cursor) == 0:
            for one in self._pass:
                one.end_scope(scope_id)
            self._scopes.pop()
        if not stray:
            return 0
        keys = [k.blocks(scope_id), k.holders]
        if self._side_index:
            keys += [k.children(scope_id), k.parents(scope_id)]
        return int(await call("kvatlas_strays", keys, stray))

    def _is_wrong(self, one: _Counted) -> bool:
        return not one.said or one.counted.words != list(one.digest)

    async def _doubt(self, one: _Counted, call: Call) -> bool:
        assert one.state is not None
        incarnation, seq, holder = one.state
        args = [one.worker_id, incarnation, seq, holder, *one.scopes]
        return bool(await call("kvatlas_doubt", [self._keys.workers, self._keys.touched], args))
