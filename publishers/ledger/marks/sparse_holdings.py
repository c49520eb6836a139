"""Which blocks an engine's sparse groups (all but full attention) hold, in whatever tier: `Block.held_by`.

A hash counts for its block while it is known, stands for that block alone, and some tier of the group holds it. A block is
held by a group while any of its hashes is.
"""

from collections.abc import Iterable

from kvatlas.events import EngineHash
from publishers.ledger.block import Block
from publishers.ledger.holdings import Holding, Holdings


class SparseHoldings:
    """The only writer of `Block.held_by`; remembers the blocks it changed."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings.sparse
        self._more: dict[tuple[Block, int], int] = {}
        """By block and group's bit: how many hashes hold the block there besides the first. Hardly ever any."""
        self._changed: list[Block] = []

    def __bool__(self) -> bool:
        return bool(self._holdings)

    def take_changed(self) -> list[Block]:
        """The blocks that a group took or gave up since the last call; some may come twice."""
        changed = self._changed
        if changed:
            self._changed = []
        return changed

    def gain(self, block: Block, bit: int) -> None:
        """One more hash of the block is held in the group with this bit."""
        if block.held_by & bit:
            self._more[block, bit] = self._more.get((block, bit), 0) + 1
        else:
            block.held_by |= bit
            self._changed.append(block)

    def lose(self, block: Block, bit: int) -> None:
        """One hash less of the block is held in the group with this bit."""
        more = self._more.get((block, bit), 0) if self._more else 0
        if more > 1:
            self._more[block, bit] = more - 1
        elif more:
            del self._more[block, bit]
        else:
            block.held_by &= ~bit
            self._changed.append(block)

    def enter(self, name: EngineHash, block: Block) -> None:
        """A hash became known: its block is held wherever the hash is."""
        for bit in self._bits_of(name):
            self.gain(block, bit)

    def leave(self, name: EngineHash, block: Block) -> None:
        """The hash is not known any more, or not for this block alone."""
        for bit in self._bits_of(name):
            self.lose(block, bit)

    def _bits_of(self, name: EngineHash) -> Iterable[int]:
        return {holding.bit for holding in self._holdings if name in holding.counts}


def is_held_elsewhere(name: EngineHash, holding: Holding) -> bool:
    """Does another tier of a sparse group hold the hash too?"""
    return any(name in counts for counts in holding.other_tiers)
