"""Usable residency: of the blocks an engine holds, those whose ancestors it holds too, in some tier.

An engine can't reuse anything behind a hole, so only this part is announced. It is kept from batch to batch: work is per
block that a batch touched, and per descendant only where a hole opens or is filled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from publishers.ledger.lineage import COPIES_BITS, ORPHAN, Block, tiers_held

_SECOND_TIER = 1 << COPIES_BITS


@dataclass(slots=True)
class Change:
    """What one batch changed in the usable residency; flags are those of `kvatlas.blocks.tiers`.

    `gone`: (block, flags it had), every descendant before its ancestors only after a sort by index. `born`: blocks that
    became usable, parents first, `Block.told` saying where. `moved`: (block, flags before) of those whose tiers changed.
    """

    gone: list[tuple[Block, int]] = field(default_factory=list)
    born: list[Block] = field(default_factory=list)
    moved: list[tuple[Block, int]] = field(default_factory=list)
    withdrawn: int = 0
    restored: int = 0


class Closure:
    """The rule itself, over `Block.told`. `orphans` counts the blocks that are held behind a hole."""

    __slots__ = ("orphans",)

    def __init__(self) -> None:
        self.orphans = 0

    def settle(self, touched: Iterable[Block]) -> Change:
        """Bring `told` in line with `copies` for the blocks whose copies changed, and for their descendants."""
        change = Change()
        gone, moved, born = change.gone, change.moved, change.born
        fresh: list[Block] = []
        for block in touched:
            block.touched = False
            copies, told = block.copies, block.told
            held = copies if copies <= 1 else 1 if copies < _SECOND_TIER else tiers_held(copies)
            if told > 0:
                if not held:
                    gone.append((block, told))
                    block.told = 0
                elif held != told:
                    moved.append((block, told))
                    block.told = held
            elif held:
                if not told:
                    fresh.append(block)
            elif told:
                block.told = 0
                self.orphans -= 1
        if gone:
            self._withdraw(change)
        for block in fresh:
            parent = block.parent
            if parent is None or parent.told > 0:
                if block.told <= 0:  # else it came with an ancestor
                    copies = block.copies
                    block.told = 1 if copies < _SECOND_TIER else tiers_held(copies)
                    born.append(block)
                    if self.orphans and block.children is not None:
                        self._restore(block, change)
            elif block.told == 0:
                block.told = ORPHAN
                self.orphans += 1
        if change.withdrawn and moved:
            change.moved = [(block, before) for block, before in moved if block.told > 0]
        return change

    def _withdraw(self, change: Change) -> None:
        """A block went: what is held behind it is no longer usable. `gone` grows while it is walked."""
        gone = change.gone
        before = {id(block): flags for block, flags in change.moved}
        for block, _ in gone:
            children = block.children
            if children is None or (isinstance(children, Block) and children.told <= 0):
                continue
            for child in block.each_child():
                if child.told > 0:
                    gone.append((child, before.get(id(child), child.told)))
                    child.told = ORPHAN
                    self.orphans += 1
                    change.withdrawn += 1

    def _restore(self, block: Block, change: Change) -> None:
        """A hole was filled: what waited behind it is usable again, chain by chain, parents first."""
        waiting = [child for child in block.each_child() if child.told == ORPHAN]
        while waiting:
            child = waiting.pop()
            child.told = tiers_held(child.copies)
            change.born.append(child)
            self.orphans -= 1
            change.restored += 1
            waiting.extend(grandchild for grandchild in child.each_child() if grandchild.told == ORPHAN)
