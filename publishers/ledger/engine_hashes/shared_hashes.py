"""Engine hashes that stand for several blocks, because the engine's hashes omit the salt or the adapter.

A removal then names the hash, not the block. The hash's own count stays correct, and only blocks that are certainly held count
as held. This is rare, so nothing here is on the path of other hashes.
"""

from collections.abc import Callable, Iterable, Sequence

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineHash
from kvatlas_publishers.ledger.block import COPIES_FIELD, Block
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.ledger.holdings import Holding, Holdings
from kvatlas_publishers.ledger.lineage import Lineage


class CertainCopies:
    """Copies of a shared hash that certainly belong to one block, and flags of the tiers in which that makes it count as
    held."""

    __slots__ = ("by_holding", "flags")

    def __init__(self, by_holding: dict[Holding, int] | None = None) -> None:
        self.by_holding = {} if by_holding is None else by_holding
        self.flags = 0


class SharedHashes:
    """`by_hash`: the certain copies of each shared hash, by block. Only this class changes it."""

    def __init__(
        self,
        lineage: Lineage,
        holdings: Holdings,
        counters: LedgerCounters,
        *,
        on_change: Callable[[Block, Tier, bool], None],
    ) -> None:
        """`on_change(block, tier, held)`: one more (or one fewer) shared hash holds the block in the tier."""
        self.by_hash: dict[EngineHash, dict[Block, CertainCopies]] = {}
        self._lineage = lineage
        self._indexed = holdings.indexed
        self._counters = counters
        self._on_change = on_change

    # ---------------------------------------------------------------- which hashes are shared

    def split(self, name: EngineHash, owner: Block, holding: Holding, copies_before: int) -> None:
        """Record that `name` stands for several blocks from now on. Its copies so far (`copies_before` in `holding`) are the
        owner's."""
        certain = CertainCopies()
        for one in self._indexed:
            count = copies_before if one is holding else one.counts.get(name, 0)
            if count:
                certain.by_holding[one] = count
            if one.in_all(name) and not (one.tier is holding.tier and not copies_before):
                certain.flags |= one.tier.flag
        self.by_hash[name] = {owner: certain}

    def add(self, name: EngineHash, block: Block) -> None:
        """Record that `name` is known for `block` from now on. None of its copies so far certainly belongs to this block."""
        self.by_hash[name] = {block: CertainCopies()}

    def restore(self, name: EngineHash, copies: dict[Block, CertainCopies]) -> None:
        """Restore a saved hash. The first block is the one for which `name` is known."""
        for block in list(copies)[1:]:
            self._lineage.share_name(name, block)
        self.by_hash[name] = copies
        self.recount(name)

    def forget(self, names: Iterable[EngineHash]) -> None:
        for name in names:
            self.by_hash.pop(name, None)

    # ---------------------------------------------------------------- copies

    def store(self, name: EngineHash, block: Block, holding: Holding, counting: bool) -> None:
        """Add a copy of exactly this block."""
        by_block = self.by_hash[name]
        certain = by_block.get(block)
        if certain is None:
            certain = by_block[block] = CertainCopies()
            self._lineage.share_name(name, block)
        certain.by_holding[holding] = certain.by_holding.get(holding, 0) + 1 if counting else 1
        self.recount(name)

    def store_any(self, name: EngineHash, holding: Holding) -> None:
        """Add a copy of the hash that names no block (an offload placeholder). It counts for each block, in any scope that
        knows the hash."""
        for certain in self.by_hash[name].values():
            certain.by_holding[holding] = certain.by_holding.get(holding, 0) + 1
        self.recount(name)

    def remove(self, removals: Sequence[tuple[EngineHash, Holding]]) -> None:
        """Remove one copy of each hash, one by one. The hashes' own counts are already reduced.

        The engine does not say which block lost its copy. But a radix tree evicts leaves, so it was not a block with a child
        held in the device tier (farther tiers are emptied in any order). Each of the others may have lost the copy, so each
        counts as having lost it. A held block may then be missing from the index until it is stored again, but no block is
        claimed that is gone.
        """
        by_hash = self.by_hash
        for name, holding in sorted(removals, key=lambda removal: -max(block.index for block in by_hash[removal[0]])):
            left = holding.counts.get(name, 0)
            by_block = by_hash[name]
            held = [block for block, certain in by_block.items() if certain.by_holding.get(holding)]
            losers = [block for block in held if not self._has_child(block, holding)] if left else held
            if left and not losers and sum(by_block[block].by_holding[holding] for block in held) > left:
                losers = held
            if len(losers) > 1 and left:
                self._counters.judged_removals += 1
            for block in held:
                counts = by_block[block].by_holding
                counts[holding] = min(counts[holding] - (block in losers), left)
                if not counts[holding]:
                    del counts[holding]
            self.recount(name)

    def _has_child(self, block: Block, holding: Holding) -> bool:
        """True if a child of the block is certainly held in the device tier."""
        if holding.tier is not Tier.HBM:
            return False
        return any(child.copies & COPIES_FIELD for child in block.iter_children())

    def clear(self, cleared: Sequence[Holding]) -> None:
        """Record that these holdings were cleared."""
        for name, by_block in self.by_hash.items():
            for certain in by_block.values():
                for holding in cleared:
                    certain.by_holding.pop(holding, None)
            self.recount(name)

    def recount_all(self) -> None:
        """Recount all hashes, because a tier has one more group."""
        for name in self.by_hash:
            self.recount(name)

    def recount(self, name: EngineHash) -> None:
        """Report each tier in which one of the hash's blocks is newly held or no longer held."""
        held_at_all = False
        for block, certain in self.by_hash[name].items():
            held = {holding.tier for holding in self._indexed}
            held -= {holding.tier for holding in self._indexed if not certain.by_holding.get(holding)}
            flags = sum(tier.flag for tier in held)
            for tier in Tier:
                if (flags ^ certain.flags) & tier.flag:
                    self._on_change(block, tier, bool(flags & tier.flag))
            certain.flags = flags
            held_at_all = held_at_all or flags != 0
        if held_at_all:
            self._lineage.mark_held(name)
        else:
            self._lineage.mark_evicted([name])
