"""The engine's own block hashes: 64 bits of a chain that starts from the engine's seed.

As with real engines, two engines with different seeds give equal tokens different hashes. Nothing outside the engine can
compute them, so a fleet's index must not depend on them.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Namespace:
    """The part of a block's hash other than its tokens. Prompts share blocks only within one namespace."""

    adapter: str | None = None
    cache_salt: str | None = None

    def extra_keys(self, *, first: bool) -> tuple[str, ...]:
        """As in vLLM: the adapter in every block, the salt only in a sequence's first block."""
        adapter = () if self.adapter is None else (self.adapter,)
        salt = (self.cache_salt,) if self.cache_salt is not None and first else ()
        return adapter + salt


class BlockHasher(Protocol):
    """Hashes a full block. The same arguments give the same hash; different ones may collide."""

    def __call__(self, parent_hash: int | None, token_ids: Sequence[int], namespace: Namespace) -> int: ...


class SeededBlockHasher:
    """XXH3_64, chained through the parent's hash; the chain starts from `seed` (64-bit)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed & 0xFFFF_FFFF_FFFF_FFFF
        self._root = _U64.pack(xxhash.xxh3_64_intdigest(b"root", seed=self._seed))

    def __call__(self, parent_hash: int | None, token_ids: Sequence[int], namespace: Namespace) -> int:
        parent = self._root if parent_hash is None else _U64.pack(parent_hash)
        body = struct.pack(f"<{len(token_ids)}I", *token_ids)
        # The salt reaches later blocks through their parent's hash. An adapter and a salt with the same name differ.
        adapter = _encode_key(b"adapter", namespace.adapter)
        salt = _encode_key(b"salt", namespace.cache_salt) if parent_hash is None else b""
        return xxhash.xxh3_64_intdigest(parent + body + adapter + salt, seed=self._seed)


def _encode_key(kind: bytes, name: str | None) -> bytes:
    return b"" if name is None else kind + _U64.pack(len(name.encode())) + name.encode()
