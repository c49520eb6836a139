"""Which blocks an engine's sparse groups (all but full attention) hold, in whatever tier: `Stretch.held_by`.

A hash counts for its block while it is known, stands for that block alone, and some tier of the group holds it. A block is
held by a group while any of its hashes is. So are the parts of a block, of a group with smaller ones (`SmallBlocks`).
"""

from collections.abc import Callable, Iterable

from kvatlas.events import EngineHash
from publishers.ledger.block import Stretch
from publishers.ledger.holdings import Holding, Holdings
from publishers.ledger.marks.small_blocks import SmallBlocks


class SparseHoldings:
    """The only writer of `Stretch.held_by`; remembers the blocks it changed."""

    def __init__(self, holdings: Holdings, parts: int) -> None:
        """`parts`: see `SmallBlocks`."""
        self.small = SmallBlocks(parts)
        self._holdings = holdings.sparse
        self._more: dict[tuple[Stretch, int], int] = {}
        """By block and group's bit: how many hashes hold the block there besides the first. Hardly ever any."""
        self._changed: list[Stretch] = []

    def __bool__(self) -> bool:
        return bool(self._holdings)

    def take_changed(self) -> list[Stretch]:
        """The blocks that a group took or gave up since the last call; some may come twice."""
        changed = self._changed
        if changed:
            self._changed = []
        return changed

    def gain(self, block: Stretch, bit: int) -> None:
        """One more hash of the block is held in the group with this bit."""
        if block.held_by & bit:
            self._more[block, bit] = self._more.get((block, bit), 0) + 1
        else:
            block.held_by |= bit
            self._changed.append(block)

    def lose(self, block: Stretch, bit: int) -> None:
        """One hash less of the block is held in the group with this bit."""
        more = self._more.get((block, bit), 0) if self._more else 0
        if more > 1:
            self._more[block, bit] = more - 1
        elif more:
            del self._more[block, bit]
        else:
            block.held_by &= ~bit
            self._changed.append(block)

    def enter(self, name: EngineHash, block: Stretch) -> None:
        """A hash became known: its block is held wherever the hash is."""
        for bit in self._bits_of(name):
            self.gain(block, bit)

    def leave(self, name: EngineHash, block: Stretch) -> None:
        """The hash is not known any more, or not for this block alone."""
        for bit in self._bits_of(name):
            self.lose(block, bit)

    def tie_small(self, block_of: Callable[[EngineHash], Stretch | None]) -> None:
        """Tie the parts of blocks that were stored since the last call, now that their anchors are known. `block_of`: an
        anchor's block, if the anchor stands for that alone."""
        for part, anchor, number in self.small.tie(lambda name: block_of(name) is not None, self._is_held):
            block = block_of(anchor)
            assert block is not None, "it is an anchor"
            for bit in self._bits_of_part(part, number):
                self.gain(block, bit)

    def forget_part(self, part: EngineHash) -> None:
        """A group does not hold the hash any more: it is forgotten unless another one does."""
        if not self._is_held(part):
            self.small.forget(part)

    def _bits_of(self, name: EngineHash) -> Iterable[int]:
        bits = {holding.bit for holding in self._holdings if name in holding.counts}
        for number, part in self.small.of(name).items():
            bits |= self._bits_of_part(part, number)
        return bits

    def _bits_of_part(self, part: EngineHash, number: int) -> set[int]:
        return {holding.part_bits[number] for holding in self._holdings if holding.part_bits and part in holding.counts}

    def _is_held(self, part: EngineHash) -> bool:
        return any(holding.part_bits and part in holding.counts for holding in self._holdings)


def is_held_elsewhere(name: EngineHash, holding: Holding) -> bool:
    """Does another tier of a sparse group hold the hash too?"""
    return any(name in counts for counts in holding.other_tiers)
