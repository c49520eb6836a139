"""Bytes of KV cache per block, by scope and tier. The index, heartbeats, loads and prices all read them from here.

The first source with a value counts:

    the engine's events    of the scope and tier, then of the scope's device tier, then of its other tiers
    the settings           --block-bytes, or a model's configuration
    the engine's metrics
"""

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.ledger.settings import LedgerSettings


class BlockBytes:
    """The block sizes of one engine; 0: unknown."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self._by_scope: dict[bytes, dict[Tier, int]] = {}
        self._latest: dict[Tier, int] = {}
        self._metrics = 0

    def tell(self, scope_id: bytes, tier: Tier, block_bytes: int) -> bool:
        """Set the size from an event. True if it was unknown or different before."""
        of_scope = self._by_scope.setdefault(scope_id, {})
        before, of_scope[tier] = of_scope.get(tier), block_bytes
        self._latest[tier] = block_bytes
        return before != block_bytes

    def tell_metrics(self, block_bytes: int) -> None:
        """Set the size from the engine's metrics."""
        self._metrics = block_bytes

    def forget_scope(self, scope_id: bytes) -> None:
        """Forget a scope that has no blocks left."""
        self._by_scope.pop(scope_id, None)

    def told(self, scope_id: bytes) -> int:
        """The scope's size according to events; 0: unknown."""
        return _first(self._by_scope.get(scope_id, {}), Tier.HBM)

    def of(self, scope_id: bytes, block_size: int | None, tier: Tier = Tier.HBM) -> int:
        """Bytes of a block of the scope in a tier."""
        return _first(self._by_scope.get(scope_id, {}), tier) or self._untold(block_size)

    def of_worker(self, block_size: int | None, tier: Tier = Tier.HBM) -> int:
        """Bytes of the worker's blocks in a tier. A model's blocks have the same size in all scopes."""
        return _first(self._latest, tier) or self._untold(block_size)

    def _untold(self, block_size: int | None) -> int:
        return self._settings.block_bytes_of(block_size) or self._metrics


def _first(by_tier: dict[Tier, int], tier: Tier) -> int:
    """The tier's size, otherwise the device tier's, otherwise any tier's."""
    return by_tier.get(tier) or by_tier.get(Tier.HBM) or next(iter(by_tier.values()), 0)
