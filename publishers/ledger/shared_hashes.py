"""Engine hashes that stand for more than one block: an engine that leaves the salt or the adapter out of its hashes.

A removal then names the hash, not the block. The hash's own count stays right; of its blocks, those count as held that are
held for certain. Rare, so nothing here is on the path of other hashes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvatlas.blocks.tiers import Tier
from kvatlas.events import EngineHash
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.lineage import COPIES_BITS, FIELD, Block, Lineages

if TYPE_CHECKING:
    from publishers.ledger.holdings import Holding


class TwinCopies:
    """Of its hash's copies those that are one block's for certain, and the flags of the tiers that it counts as held in for
    that."""

    __slots__ = ("by_holding", "flags")

    def __init__(self, by_holding: "dict[Holding, int] | None" = None) -> None:
        self.by_holding = {} if by_holding is None else by_holding
        self.flags = 0


class Twins:
    """Copies of hashes with several blocks, kept by block. `touch` is called for each block whose copies changed."""

    def __init__(
        self,
        lineages: Lineages,
        indexed: Sequence["Holding"],
        touch: Callable[[Block], None],
        counters: LedgerCounters,
    ) -> None:
        self._lineages = lineages
        self._indexed = indexed
        self._touch = touch
        self._counters = counters

    def part(self, name: EngineHash, owner: Block, holding: "Holding", copies_before: int) -> None:
        """From now on `name` stands for several blocks; the copies so far (`copies_before` in `holding`) are the owner's."""
        share = TwinCopies()
        for one in self._indexed:
            count = copies_before if one is holding else one.counts.get(name, 0)
            if count:
                share.by_holding[one] = count
            if one.in_all(name) and not (one.tier is holding.tier and not copies_before):
                share.flags |= one.tier.flag
        self._lineages.twins[name] = {owner: share}

    def begin(self, name: EngineHash, block: Block) -> None:
        """`name` is known for `block` from now on; none of its copies so far is this block's for certain."""
        self._lineages.twins[name] = {block: TwinCopies()}

    def store(self, name: EngineHash, block: Block, holding: "Holding", counting: bool) -> None:
        """A copy of this very block."""
        by_block = self._lineages.twins[name]
        share = by_block.get(block)
        if share is None:
            share = by_block[block] = TwinCopies()
            block.names += 1
        share.by_holding[holding] = share.by_holding.get(holding, 0) + 1 if counting else 1
        self.recount(name)

    def store_any(self, name: EngineHash, holding: "Holding") -> None:
        """A copy of the hash that names no block (an offload placeholder): of each, in any scope the hash is known."""
        for share in self._lineages.twins[name].values():
            share.by_holding[holding] = share.by_holding.get(holding, 0) + 1
        self.recount(name)

    def remove(self, gone: "Sequence[tuple[EngineHash, Holding]]") -> None:
        """One copy of each hash went, all of them one after the other; the hashes' counts are already less.

        Which block's copy it was is not told. What is certain: a radix tree evicts leaves, so it was none that a child of is
        held in the device tier (the tiers behind it are emptied in any order). Each of the others may have lost it, so each
        counts as having lost it: a block that is held may go unannounced until it is stored again, none is claimed that went.
        """
        by_block_of = self._lineages.twins
        for name, holding in sorted(gone, key=lambda one: -max(block.index for block in by_block_of[one[0]])):
            left = holding.counts.get(name, 0)
            by_block = by_block_of[name]
            held = [block for block, share in by_block.items() if share.by_holding.get(holding)]
            losers = [block for block in held if not self._has_child(block, holding)] if left else held
            if left and not losers and sum(by_block[block].by_holding[holding] for block in held) > left:
                losers = held
            if len(losers) > 1 and left:
                self._counters.judged_removals += 1
            for block in held:
                share = by_block[block].by_holding
                share[holding] = min(share[holding] - (block in losers), left)
                if not share[holding]:
                    del share[holding]
            self.recount(name)

    def _has_child(self, block: Block, holding: "Holding") -> bool:
        """Is a child of the block held for certain in the device tier?"""
        if holding.tier is not Tier.HBM:
            return False
        return any(child.copies & FIELD for child in block.each_child())

    def clear(self, cleared: Sequence["Holding"]) -> None:
        """The counts of these holdings are gone."""
        for name, by_block in self._lineages.twins.items():
            for share in by_block.values():
                for holding in cleared:
                    share.by_holding.pop(holding, None)
            self.recount(name)

    def recount(self, name: EngineHash) -> None:
        """Bring the blocks' copies in line with the shares."""
        held_at_all = False
        for block, share in self._lineages.twins[name].items():
            held = {holding.tier for holding in self._indexed}
            held -= {holding.tier for holding in self._indexed if not share.by_holding.get(holding)}
            flags = sum(tier.flag for tier in held)
            for tier in Tier:
                if (flags ^ share.flags) & tier.flag:
                    block.copies += (1 if flags & tier.flag else -1) << COPIES_BITS * tier
                    self._touch(block)
            share.flags = flags
            held_at_all = held_at_all or flags != 0
        if held_at_all:
            self._lineages.evicted.pop(name, None)
        else:
            self._lineages.evicted[name] = None
