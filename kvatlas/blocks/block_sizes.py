"""The sizes of a worker's blocks in one scope."""

from collections.abc import Iterable
from typing import NamedTuple, Self

from kvatlas.blocks.tiers import Tier

TierBytes = tuple[tuple[Tier, int], ...]
"""Bytes of KV cache per block in individual tiers other than the device's, in the order of the tiers."""


class BlockSizes(NamedTuple):
    """Tokens per block, and bytes of KV cache per block (0: unknown): `block_bytes` applies to the device's memory and to every
    tier that `tier_bytes` doesn't list."""

    block_size: int = 0
    block_bytes: int = 0
    tier_bytes: TierBytes = ()

    def bytes_in(self, tier: Tier) -> int:
        """Bytes per block in a tier."""
        for one, size in self.tier_bytes:
            if one is tier:
                return size
        return self.block_bytes

    def updated(self, new: Self) -> Self:
        """These sizes, updated with those from a message. Where the message gives no size, the present one is kept."""
        if not new.tier_bytes and not self.tier_bytes:
            return new if new.block_bytes else self
        size, block_bytes = new[:2] if new.block_bytes else self[:2]
        return self._replace(
            block_size=size,
            block_bytes=block_bytes,
            tier_bytes=in_order({**dict(self.tier_bytes), **dict(new.tier_bytes)}.items()),
        )


def in_order(sizes: Iterable[tuple[int, int]]) -> TierBytes:
    """Sizes by tier, in the order of the tiers."""
    return tuple((Tier(tier), size) for tier, size in sorted(sizes))
