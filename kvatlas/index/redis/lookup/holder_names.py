"""The workers behind the active holders of a shard, cached until their version changes."""

from collections.abc import Mapping

from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import pairs, unpack_names

HOLDERS_A_CALL = 1_000


class HolderNames:
    """The active holders of one shard at one version, and at the previously read version."""

    def __init__(self, keys: ShardKeys) -> None:
        self._keys = keys
        self.version = b""
        self._names: dict[int, str] = {}
        self._before: dict[int, str] = {}

    async def read(self, functions: IndexFunctions) -> None:
        """Read the current version. If it changes while several calls are reading many holders, `version` is empty, and the
        names are those that were active at some moment during the read."""
        keys, cursor = [self._keys.active, self._keys.meta], b"0"
        names: dict[int, str] = {}
        versions: set[bytes] = set()
        while not versions or cursor != b"0":
            version, cursor, flat = await functions.call_ro("kvatlas_active", keys, [cursor, HOLDERS_A_CALL])
            versions.add(version)
            names.update((int.from_bytes(holder, "big"), name) for holder, name in unpack_names(pairs(flat)).items())
        if versions != {self.version}:
            self._before = self._names
            self._names = names
            self.version = versions.pop() if len(versions) == 1 else b""

    def at(self, version: bytes) -> Mapping[int, str]:
        """The names at a version; exact for the version that was read last. If holders change faster than they can be read,
        these are the names that were active both before and after this version, and therefore also at it."""
        if version == self.version:
            return self._names
        return {holder: name for holder, name in self._names.items() if self._before.get(holder) == name}
