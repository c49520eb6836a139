"""Reference counts of the copies an engine holds in one (tier, group)."""

from kvatlas.blocks.tiers import Tier
from kvatlas.events import EngineHash
from publishers.ledger.lineage import COPIES_BITS


class Holding:
    """`counts`: engine hash to copies, none at zero. `peers`: the counts of the tier's other indexable groups.

    A group is indexable when it says how long a prefix can be reused (full attention); `unit` is one copy's part of
    `Block.copies`.
    """

    __slots__ = ("counts", "flag", "group", "indexable", "peers", "tier", "unit")

    def __init__(self, tier: Tier, group: int, indexable: bool) -> None:
        self.tier, self.group, self.indexable = tier, group, indexable
        self.counts: dict[EngineHash, int] = {}
        self.flag = tier.flag
        self.unit = 1 << COPIES_BITS * tier
        self.peers: list[dict[EngineHash, int]] = []

    def in_all(self, name: EngineHash) -> bool:
        """Is the hash held in every indexable group of the tier? vLLM reuses a block only then."""
        if name not in self.counts:
            return False
        return not self.peers or all(name in counts for counts in self.peers)
