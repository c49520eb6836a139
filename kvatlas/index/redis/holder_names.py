"""Which workers the active holders of a shard stand for, cached until the store says that they changed."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kvatlas.index.redis.keys import ShardKeys

Call = Callable[[str, Sequence[str], Sequence[Any]], Awaitable[Any]]


class HolderNames:
    """The active holders of one shard at one version, and at the version read before it."""

    def __init__(self, keys: ShardKeys) -> None:
        self._keys = keys
        self.version = b""
        self._names: dict[int, str] = {}
        self._before: dict[int, str] = {}

    async def read(self, call: Call) -> None:
        """Read them anew."""
        version, flat = await call("kvatlas_active", [self._keys.active, self._keys.meta], [])
        if version != self.version:
            self._before = self._names
            self._names = {int.from_bytes(flat[i], "big"): flat[i + 1].decode() for i in range(0, len(flat), 2)}
            self.version = version

    def at(self, version: bytes) -> Mapping[int, str]:
        """The names at a version: exact at the version read; where the holders change faster than they can be read,
        those that were active before and after it, and so at it."""
        if version == self.version:
            return self._names
        return {holder: name for holder, name in self._names.items() if self._before.get(holder) == name}
