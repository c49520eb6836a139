"""Blocks that an engine's sparse groups (all but full attention) hold in any tier: `Stretch.held_by`.

A hash counts for its block while it is known, stands only for that block, and some tier of the group holds it. A group holds a
block while it holds any of the block's hashes. The same applies to parts of a block in a group with smaller blocks
(`SmallBlocks`).
"""

from collections.abc import Callable, Container, Iterable, Sequence

from kvatlas_publishers.engine_events import EngineHash, EngineStored
from kvatlas_publishers.ledger.block import Block, Stretch
from kvatlas_publishers.ledger.holdings import Holding, Holdings
from kvatlas_publishers.ledger.marks.small_blocks import SmallBlocks


class SparseHoldings:
    """The only writer of `Stretch.held_by`. Remembers the blocks it changed."""

    def __init__(
        self,
        holdings: Holdings,
        parts: int,
        *,
        block_of: Callable[[EngineHash], Block | None],
        shared: Container[EngineHash],
    ) -> None:
        """`parts`: see `SmallBlocks`. `block_of`: the block that a hash stands for; `shared`: hashes that stand for several."""
        self.small = SmallBlocks(parts)
        self._block_of = block_of
        self._shared = shared
        self._holdings = holdings.sparse
        self._more: dict[tuple[Stretch, int], int] = {}
        """Number of hashes beyond the first that hold a block, by block and group's bit. Almost always empty."""
        self._changed: list[Stretch] = []

    def __bool__(self) -> bool:
        return bool(self._holdings)

    def take_changed(self) -> list[Stretch]:
        """Blocks that a group gained or lost since the last call; some may be listed twice."""
        changed = self._changed
        if changed:
            self._changed = []
        return changed

    def store(self, event: EngineStored, holding: Holding, *, counting: bool) -> None:
        """Count copies in a group that residency does not cover. Its blocks are those that full attention stored under the same
        hashes. If `counting` is False, second copies don't count."""
        counts, bit, shared, block_of = holding.counts, holding.bit, self._shared, self._block_of
        for name in event.hashes:
            count = counts.get(name, 0)
            counts[name] = count + 1 if counting else 1
            if bit and not count:
                block = block_of(name)
                if block is None:
                    if holding.part_bits:
                        self._change_parts(name, holding, self.gain)
                elif name not in shared and not is_held_elsewhere(name, holding):
                    self.gain(block, bit)
        if holding.part_bits and event.token_ids and not event.offloaded:  # a connector orders hashes differently
            self.small.stored(event.hashes)

    def remove(self, names: Sequence[EngineHash], holding: Holding) -> int:
        """Remove one copy of each hash. Returns the number of hashes that had no copy."""
        counts, unknown = holding.counts, 0
        for name in names:
            count = counts.get(name)
            if count is None:
                unknown += 1
            elif count > 1:
                counts[name] = count - 1
            else:
                del counts[name]
                if holding.bit:
                    self._give_up(name, holding)
        return unknown

    def clear(self, cleared: Sequence[Holding]) -> None:
        """Record that all copies in these holdings are gone."""
        gone: dict[int, set[EngineHash]] = {}
        for holding in cleared:
            if holding.bit:
                gone.setdefault(holding.bit, set()).update(holding.counts)
                holding.counts.clear()
        for holding in cleared:
            for name in gone.pop(holding.bit, ()):
                self._give_up(name, holding)

    def _give_up(self, name: EngineHash, holding: Holding) -> None:
        """Record that the holding's last copy of a hash is gone."""
        block = self._block_of(name)
        if block is None:
            if holding.part_bits:
                self._change_parts(name, holding, self.lose)
                self._forget_part(name)
        elif name not in self._shared and not is_held_elsewhere(name, holding):
            self.lose(block, holding.bit)

    def _change_parts(self, name: EngineHash, holding: Holding, change: Callable[[Block, int], None]) -> None:
        """`change` the bits of the published blocks that contain a hash that a group with smaller blocks gained or lost."""
        if is_held_elsewhere(name, holding):
            return
        for anchor, number in self.small.tied.get(name, {}).items():
            block = self._block_of(anchor)
            if block is not None and anchor not in self._shared:
                change(block, holding.part_bits[number])

    def gain(self, block: Stretch, bit: int) -> None:
        """Count one more held hash of the block in the group with this bit."""
        if block.held_by & bit:
            self._more[block, bit] = self._more.get((block, bit), 0) + 1
        else:
            block.held_by |= bit
            self._changed.append(block)

    def lose(self, block: Stretch, bit: int) -> None:
        """Count one fewer held hash of the block in the group with this bit."""
        more = self._more.get((block, bit), 0) if self._more else 0
        if more > 1:
            self._more[block, bit] = more - 1
        elif more:
            del self._more[block, bit]
        else:
            block.held_by &= ~bit
            self._changed.append(block)

    def enter(self, name: EngineHash, block: Stretch) -> None:
        """Count a newly known hash's block as held wherever the hash is held."""
        for bit in self._bits_of(name):
            self.gain(block, bit)

    def leave(self, name: EngineHash, block: Stretch) -> None:
        """Undo `enter` for a hash that is no longer known, or no longer stands only for this block."""
        for bit in self._bits_of(name):
            self.lose(block, bit)

    def tie_small(self) -> None:
        """Tie the parts of blocks that were stored since the last call, now that their anchors are known. An anchor is a hash
        of exactly one block."""

        def is_anchor(name: EngineHash) -> bool:
            return name not in self._shared and self._block_of(name) is not None

        for part, anchor, number in self.small.tie(is_anchor, self._is_held):
            block = self._block_of(anchor)
            assert block is not None, "it is an anchor"
            for bit in self._bits_of_part(part, number):
                self.gain(block, bit)

    def _forget_part(self, part: EngineHash) -> None:
        """Forget a hash that a group no longer holds, unless another group holds it."""
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
    """True if another tier of a sparse group holds the hash too."""
    return any(name in counts for counts in holding.other_tiers)
