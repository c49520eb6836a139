"""The blocks that were pinned when they were put. Direct writes record them, separately from the messages."""

from collections.abc import Iterable

from kvatlas.blocks.tiers import Tier


class Pins:
    """`tiers` maps (holder, scope id, hash) to the flags of the tiers in which the block is pinned. Pins of blocks that the
    holder does not have in that tier mean nothing."""

    def __init__(self) -> None:
        self.tiers: dict[tuple[int, bytes, bytes], int] = {}

    def put(self, holder: int, scope_id: bytes, tier: Tier, hashes: Iterable[bytes], *, pinned: bool) -> None:
        """Pin or unpin these blocks in the tier."""
        for key in hashes:
            place = (holder, scope_id, key)
            before = self.tiers.get(place, 0)
            if after := before | tier.flag if pinned else before & ~tier.flag:
                self.tiers[place] = after
            elif before:
                del self.tiers[place]

    def has(self, holder: int, scope_id: bytes, key: bytes, tier: Tier) -> bool:
        return bool(self.tiers.get((holder, scope_id, key), 0) & tier.flag)

    def forget(self, holder: int) -> None:
        """Remove all pins of the holder, because its number may be given to another holder."""
        for place in [place for place in self.tiers if place[0] == holder]:
            del self.tiers[place]
