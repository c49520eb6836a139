"""Frees the memory of retired holders, in a part of some scopes at a time."""

from itertools import chain
from typing import Any

from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import unpack_touched

HOLDERS_A_ROUND = 32
CALL_COST = 600
"""Maximum work of a call (`functions/sweep.lua`), in units that take the store two microseconds each, whatever the values
are."""
SCOPES_A_CALL = 100


class Sweep:
    """The progress of one shard's sweep. Losing it only costs work: a number is freed only in a call that checks that the whole
    sweep ran on this server, and that the number still belongs to the holder that was swept."""

    def __init__(self, keys: ShardKeys, side_index: bool) -> None:
        self._keys = keys
        self._side_index = side_index
        self._holders: dict[bytes, bytes] = {}
        """For each number, the entry in the holders' hash as it was before the sweep."""
        self._scopes: list[bytes] = []
        """Scopes whose blocks are still to be swept."""
        self._marks_of: list[bytes] = []
        """Scopes whose marks are still to be swept, after all blocks."""
        self._cursor: int | bytes = 0
        self._server = b""

    async def run(self, client: Any, functions: IndexFunctions, budget: int) -> int:
        """Look at about `budget` more entries. Returns the number of retired holders that are left."""
        while True:
            if not self._holders and not await self._begin(client):
                return 0
            while self._scopes or self._marks_of or not self._server:
                budget -= await self._continue(functions)
                if budget <= 0:
                    return int(await client.scard(self._keys.retired))
            left = await self._release(functions)
            budget -= 1
            if left == 0 or budget <= 0:
                return left

    async def _begin(self, client: Any) -> bool:
        """Choose some retired holders. Returns False if there are none left."""
        k = self._keys
        numbers = list(await client.srandmember(k.retired, HOLDERS_A_ROUND))
        entries = await client.hmget(k.holders, numbers) if numbers else []
        self._holders = {number: entry or b"" for number, entry in zip(numbers, entries, strict=True)}
        scopes: set[bytes] = set()
        for number in numbers:  # one by one, because a holder may have used thousands of scopes
            scopes.update(unpack_touched(await client.hget(k.touched, number)))
        self._scopes = sorted(scopes)
        any_marked = any(await client.hmget(k.marked, numbers)) if numbers else False
        self._marks_of = list(self._scopes) if any_marked else []
        self._cursor = 0
        self._server = b""
        return bool(numbers)

    async def _continue(self, functions: IndexFunctions) -> int:
        """Make one call. Returns its cost."""
        k = self._keys
        of_marks = not self._scopes and bool(self._marks_of)
        scopes = self._marks_of if of_marks else self._scopes
        some = scopes[-SCOPES_A_CALL:][::-1]
        keys = (
            [k.retired, k.marked]
            if of_marks
            else [k.retired, k.digests, k.held, k.holders, k.touched, k.moments, k.spent]
        )
        for scope_id in some:
            keys += [k.marks(scope_id) if of_marks else k.blocks(scope_id)]
            if self._side_index and not of_marks:
                keys += [k.children(scope_id), k.parents(scope_id)]
        args = [self._server, CALL_COST, self._cursor, b"".join(some), b"".join(self._holders)]
        self._server, *progress = await functions.call(
            "kvatlas_sweep_marks" if of_marks else "kvatlas_sweep", keys, args
        )
        if not progress:  # the store failed over
            self._holders, self._scopes, self._marks_of = {}, [], []
            return CALL_COST
        done, self._cursor, cost = progress
        del scopes[len(scopes) - done :]
        return int(cost)

    async def _release(self, functions: IndexFunctions) -> int:
        """Free the holders that were swept. Returns the number of retired holders that are left."""
        k = self._keys
        args = [self._server, *chain.from_iterable(self._holders.items())]
        keys = [
            k.holders,
            k.retired,
            k.digests,
            k.touched,
            k.free,
            k.marked,
            k.pinned,
            *map(k.pinned_by, self._holders),
        ]
        self._holders = {}
        return int(await functions.call("kvatlas_release", keys, args))
