"""Giving back the memory of retired holders, a part of one scope at a time."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Any

from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.values import scopes_touched

HOLDERS_A_ROUND = 256
ENTRIES_A_CALL = 1_000

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]


class Sweep:
    """The place where one shard's sweep stands. Losing it costs work, nothing else: a number is freed only in a call that
    sees it retired and its count at zero, or after one server's whole scan that found nothing of it."""

    def __init__(self, keys: ShardKeys, side_index: bool) -> None:
        self._keys = keys
        self._side_index = side_index
        self._holders: dict[bytes, bytes] = {}
        """Each number's entry in the holders, as it was before the scan."""
        self._scopes: list[bytes] = []
        self._cursor: int | bytes = 0
        self._taken = 0
        self._servers: set[bytes] = set()

    async def run(self, client: Any, call: Call, budget_entries: int) -> int:
        """Go on for about `budget_entries` looked-at entries; how many retired holders are left."""
        k = self._keys
        while True:
            if not self._holders:
                numbers = list(await client.srandmember(k.retired, HOLDERS_A_ROUND))
                if not numbers:
                    return 0
                entries = await client.hmget(k.holders, numbers)
                touched = await client.hmget(k.touched, numbers)
                self._holders = {number: entry or b"" for number, entry in zip(numbers, entries, strict=True)}
                self._scopes = sorted({scope_id for packed in touched for scope_id in scopes_touched(packed)})
                self._cursor = self._taken = 0
                self._servers.clear()
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
            proven = int(not self._taken and len(self._servers) <= 1)
            keys = [k.holders, k.retired, k.digests, k.touched, k.free]
            left = int(await call("kvatlas_release", keys, [proven, *chain.from_iterable(self._holders.items())]))
            self._holders = {}
            if left == 0 or budget_entries <= 0:
                return left
