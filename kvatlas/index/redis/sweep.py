"""Giving back the memory of retired holders, a part of one scope at a time."""

from itertools import chain
from typing import Any

from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import unpack_touched

HOLDERS_A_ROUND = 256
ENTRIES_A_CALL = 1_000


class Sweep:
    """The progress of one shard's sweep. Losing it costs work, nothing else: a number is freed only in a call that sees it
    retired and its count at zero, or after one server's whole scan that found no entry of it."""

    def __init__(self, keys: ShardKeys, side_index: bool) -> None:
        self._keys = keys
        self._side_index = side_index
        self._holders: dict[bytes, bytes] = {}
        """By number, its entry in the holders' hash as it was before the scan."""
        self._scopes: list[bytes] = []
        self._cursor: int | bytes = 0
        self._taken = 0
        self._any_marked = self._in_marks = False
        """Do some of the holders have marks, so that these are scanned too, after a scope's blocks? Is that going on?"""
        self._servers: set[bytes] = set()

    async def run(self, client: Any, functions: IndexFunctions, budget_entries: int) -> int:
        """Scan about `budget_entries` more entries. Returns how many retired holders are left."""
        k = self._keys
        while True:
            if not self._holders:
                numbers = list(await client.srandmember(k.retired, HOLDERS_A_ROUND))
                if not numbers:
                    return 0
                entries = await client.hmget(k.holders, numbers)
                touched = await client.hmget(k.touched, numbers)
                self._holders = {number: entry or b"" for number, entry in zip(numbers, entries, strict=True)}
                self._scopes = sorted({scope_id for packed in touched for scope_id in unpack_touched(packed)})
                self._any_marked = any(await client.hmget(k.marked, numbers))
                self._cursor = self._taken = 0
                self._in_marks = False
                self._servers.clear()
            while self._scopes:
                scope_id = self._scopes[-1]
                keys = [k.blocks(scope_id), k.retired, k.digests]
                if self._side_index:
                    keys += [k.children(scope_id), k.parents(scope_id)]
                args = [scope_id, self._cursor, ENTRIES_A_CALL, *self._holders]
                function = "kvatlas_sweep"
                if self._in_marks:
                    function, keys = "kvatlas_sweep_marks", [k.marks(scope_id), k.retired, k.marked]
                self._cursor, taken, server = await functions.call(function, keys, args)
                self._taken += taken
                self._servers.add(server)
                if int(self._cursor) == 0:
                    self._in_marks = self._any_marked and not self._in_marks
                    if not self._in_marks:
                        self._scopes.pop()
                budget_entries -= ENTRIES_A_CALL
                if budget_entries <= 0:
                    return int(await client.scard(k.retired))
            proven = int(not self._taken and len(self._servers) <= 1)
            keys = [k.holders, k.retired, k.digests, k.touched, k.free, k.marked]
            args = [proven, *chain.from_iterable(self._holders.items())]
            left = int(await functions.call("kvatlas_release", keys, args))
            self._holders = {}
            if left == 0 or budget_entries <= 0:
                return left
