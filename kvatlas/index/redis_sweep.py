"""Giving back the memory of retired holders, a part of one scope at a time."""

from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from kvatlas.index.keys import ShardKeys
from kvatlas.index.redis_answers import scopes_touched

HOLDERS_A_ROUND = 256
ENTRIES_A_CALL = 1_000
PROOF_S = 300.0
"""A scan that took longer proves nothing: a number may be used again after ten minutes."""

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]


class Sweep:
    """The place where one shard's sweep stands. Losing it costs work, nothing else: a number is freed only in a call that
    sees it retired and its count at zero, or after one server's whole scan that found nothing of it."""

    def __init__(self, keys: ShardKeys, side_index: bool) -> None:
        self._keys = keys
        self._side_index = side_index
        self._holders: list[bytes] = []
        self._scopes: list[bytes] = []
        self._cursor: int | bytes = 0
        self._taken = 0
        self._servers: set[bytes] = set()
        self._began_s = 0.0

    async def run(self, client: Any, call: Call, budget_entries: int) -> int:
        """Go on for about `budget_entries` looked-at entries; how many retired holders are left."""
        k = self._keys
        while True:
            if not self._holders:
                self._holders = list(await client.srandmember(k.retired, HOLDERS_A_ROUND))
                if not self._holders:
                    return 0
                touched = await client.hmget(k.touched, self._holders)
                self._scopes = sorted({scope_id for packed in touched for scope_id in scopes_touched(packed)})
                self._cursor = self._taken = 0
                self._servers.clear()
                self._began_s = monotonic()
            while self._scopes:
                scope_id = self._scopes[-1]
                keys = [k.blocks(scope_id), k.retired, k.digests]
                if self._side_index:
                    keys += [k.children(scope_id), k.parents(scope_id)]
                answer = await call("kvatlas_sweep", keys, [scope_id, self._cursor, ENTRIES_A_CALL, *self._holders])
                self._cursor = answer[0]
                self._taken += answer[1]
                self._servers.add(answer[2])
                if int(self._cursor) == 0:
                    self._scopes.pop()
                budget_entries -= ENTRIES_A_CALL
                if budget_entries <= 0:
                    return int(await client.scard(k.retired))
            quick = monotonic() - self._began_s < PROOF_S
            proven = int(not self._taken and len(self._servers) <= 1 and quick)
            keys = [k.holders, k.retired, k.digests, k.touched, k.free]
            left = int(await call("kvatlas_release", keys, [proven, *self._holders]))
            self._holders = []
            if left == 0 or budget_entries <= 0:
                return left
