"""Reads the byte-seconds of residency in one shard."""

from collections.abc import Collection, Iterator

from kvatlas.blocks.tiers import Tier
from kvatlas.identity import SCOPE_ID_BYTES
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.shard_reader import read_hash
from kvatlas.store.connection import Store

SCOPES_A_CALL = 256
TRIES = 5
"""Maximum number of attempts: if a sweep moves a holder's usage to the spent usage between two reads, both are read again."""

Amounts = list[tuple[bytes, Tier, float]]
"""(scope id, tier, byte-seconds)"""


class UsageReader:
    """Reads one shard's usage. Every call raises Unreachable."""

    def __init__(self, store: Store, functions: IndexFunctions, keys: ShardKeys) -> None:
        self._store = store
        self._functions = functions
        self._keys = keys

    async def read(self) -> Amounts:
        """The usage of all holders, including retired ones, and the usage that has already been settled."""
        for _ in range(TRIES):
            spent = await read_hash(self._store, self._keys.spent)
            held = [
                one for holder in await read_hash(self._store, self._keys.holders) for one in await self._of(holder)
            ]
            if await read_hash(self._store, self._keys.spent) == spent:
                break
        return [*held, *_amounts(list(spent.items()))]

    async def spent_scopes(self) -> set[bytes]:
        return {field[:SCOPE_ID_BYTES] for field in await read_hash(self._store, self._keys.spent)}

    async def merge(self, scope_ids: Collection[bytes]) -> None:
        """Count the spent usage of these scopes without their names from now on. At most 200 scopes."""
        await self._functions.call("kvatlas_usage_merge", [self._keys.spent], list(scope_ids))

    async def _of(self, holder: bytes) -> Amounts:
        k, found, first, scopes = self._keys, Amounts(), 0, 1
        while first < scopes:
            keys, args = [k.holders, k.held, k.moments, k.touched], [holder, first, SCOPES_A_CALL]
            scopes, flat = await self._functions.call_ro("kvatlas_usage", keys, args)
            found += _amounts(list(zip(flat[::2], flat[1::2], strict=True)))
            first += SCOPES_A_CALL
        return found


def _amounts(fields: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, Tier, float]]:
    return ((field[:SCOPE_ID_BYTES], Tier(field[SCOPE_ID_BYTES]), float(ms) / 1e3) for field, ms in fields)
