"""The workers behind the active holders of a shard, cached until their version changes."""

from collections.abc import Mapping

from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import pairs


class HolderNames:
    """The active holders of one shard at one version, and at the version read before it."""

    def __init__(self, keys: ShardKeys) -> None:
        self._keys = keys
        self.version = b""
        self._names: dict[int, str] = {}
        self._before: dict[int, str] = {}

    async def read(self, functions: IndexFunctions) -> None:
        """Read the current version."""
        version, flat = await functions.call_ro("kvatlas_active", [self._keys.active, self._keys.meta])
        if version != self.version:
            self._before = self._names
            self._names = {int.from_bytes(holder, "big"): name.decode() for holder, name in pairs(flat)}
            self.version = version

    def at(self, version: bytes) -> Mapping[int, str]:
        """The names at a version: exact at the version read last. If holders change faster than they can be read, those
        that were active before and after this version, and so at it."""
        if version == self.version:
            return self._names
        return {holder: name for holder, name in self._names.items() if self._before.get(holder) == name}
