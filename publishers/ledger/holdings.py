"""Reference counts of an engine's copies, by (tier, group)."""

from collections.abc import Sequence

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineHash
from kvatlas_publishers.ledger.block import COPIES_BITS


class Holding:
    """`counts`: copies by engine hash, without zeros and without plain stretches. `peers`: the counts of the tier's other
    indexable groups.

    A group is indexable if it has full attention: residency covers only these. `unit`: one copy in `Stretch.copies`. If a
    sparse group's blocks decide where a prompt can be resumed, `bit` is its bit in `Stretch.held_by`: one for the device tier,
    one for all others. `other_tiers` are its counts in the other tiers with this bit; all other groups have `bit` 0.
    `part_bits`: the bits before it, for the group's other blocks within a published one, if its blocks are smaller
    (`marks.small_blocks`).
    """

    __slots__ = ("bit", "counts", "flag", "group", "indexable", "other_tiers", "part_bits", "peers", "tier", "unit")

    def __init__(self, tier: Tier, group: int, indexable: bool, bits: Sequence[int] = ()) -> None:
        self.tier, self.group, self.indexable = tier, group, indexable
        self.bit = bits[-1] if bits else 0
        self.part_bits = bits[:-1]
        self.counts: dict[EngineHash, int] = {}
        self.flag = tier.flag
        self.unit = 1 << COPIES_BITS * tier
        self.peers: list[dict[EngineHash, int]] = []
        self.other_tiers: list[dict[EngineHash, int]] = []

    def in_all(self, name: EngineHash) -> bool:
        """True if every indexable group of the tier holds the hash. vLLM reuses a block only then."""
        if name not in self.counts:
            return False
        return not self.peers or all(name in counts for counts in self.peers)


class Holdings:
    """All holdings of one engine, in the order of their first events."""

    def __init__(self) -> None:
        self.by_group: dict[tuple[Tier, int], Holding] = {}
        self.indexed: list[Holding] = []
        self.sparse: list[Holding] = []
        """Holdings with a bit."""

    def add(self, tier: Tier, group: int, indexable: bool, bits: Sequence[int] = ()) -> Holding:
        holding = self.by_group[tier, group] = Holding(tier, group, indexable, bits)
        if indexable:
            peers = self.of_tier(tier)
            for other in peers:
                other.peers.append(holding.counts)
            holding.peers = [other.counts for other in peers]
            self.indexed.append(holding)
        elif bits:
            others = [other for other in self.sparse if (other.group, other.bit) == (group, holding.bit)]
            for other in others:
                other.other_tiers.append(holding.counts)
            holding.other_tiers = [other.counts for other in others]
            self.sparse.append(holding)
        return holding

    def of_tier(self, tier: Tier) -> list[Holding]:
        """The tier's indexable holdings."""
        return [holding for holding in self.indexed if holding.tier is tier]

    def is_held(self, name: EngineHash) -> bool:
        """True if all indexable groups of some tier hold the hash. Don't call it for hashes of plain stretches."""
        return any(holding.in_all(name) for holding in self.indexed)
