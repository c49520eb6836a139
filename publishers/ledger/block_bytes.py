"""Bytes of KV cache per block, by scope and tier. The index, heartbeats, loads and prices all read them from here.

The first source with a value counts:

    the engine's events    of the scope and tier, then of the scope's device tier
    the settings           --block-bytes, or a model's configuration
    the engine's metrics   of a shared store: what most of its writers give
    the engine's events    of the scope's other tiers
"""

from collections.abc import Mapping, Set

from kvatlas.blocks.block_sizes import BlockSizes, TierBytes
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.ledger.settings import LedgerSettings


class BlockBytes:
    """The block sizes of one engine; 0: unknown."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._by_scope: dict[bytes, dict[Tier, int]] = {}
        self._latest: dict[Tier, int] = {}
        self._listed: set[Tier] = set()
        """Tiers once listed in `BlockSizes.tier_bytes` of any scope. They stay listed, because the index keeps what a message
        does not list, even if the scope was forgotten here."""
        self._metrics = 0

    def tell(self, scope_id: bytes, tier: Tier, block_bytes: int) -> bool:
        """Set the size given by an event. Returns True if it was unknown or different before."""
        of_scope = self._by_scope.setdefault(scope_id, {})
        before, of_scope[tier] = of_scope.get(tier), block_bytes
        self._latest[tier] = block_bytes
        return before != block_bytes

    def tell_metrics(self, block_bytes: int) -> None:
        """Set the size given by the engine's metrics."""
        self._metrics = block_bytes

    def forget_scope(self, scope_id: bytes) -> None:
        self._by_scope.pop(scope_id, None)

    def told(self, scope_id: bytes) -> Mapping[Tier, int]:
        """The scope's sizes according to events, by tier."""
        return self._by_scope.get(scope_id, {})

    def of(self, scope_id: bytes, block_size: int | None) -> BlockSizes:
        """The sizes of a scope's blocks of `block_size` tokens."""
        found = self._sizes(self.told(scope_id), block_size, self._listed)
        self._listed.update(tier for tier, _ in found.tier_bytes)
        return found

    def of_worker(self, block_size: int | None) -> BlockSizes:
        """The sizes of the worker's blocks. A model's blocks have the same size in all scopes."""
        return self._sizes(self._latest, block_size)

    def _sizes(self, told: Mapping[Tier, int], block_size: int | None, listed: Set[Tier] = frozenset()) -> BlockSizes:
        untold = self._settings.block_bytes_of(block_size) or self._metrics or next(iter(told.values()), 0)
        in_device = told.get(Tier.HBM) or untold
        tier_bytes: TierBytes = tuple(
            (tier, told[tier])
            for tier in sorted(told)
            if tier is not Tier.HBM and (told[tier] != in_device or tier in listed)
        )
        return BlockSizes(block_size or 0, in_device, tier_bytes)
