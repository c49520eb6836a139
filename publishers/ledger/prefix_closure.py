"""Usable residency: the held blocks whose ancestors are all held too, in any tier.

An engine can't reuse anything after a hole, so only this part is published. It is updated from batch to batch: the work is
proportional to the changed blocks, plus their descendants if a hole opens or is filled.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvatlas_publishers.ledger.block import COPIES_BITS, ORPHAN, Stretch, tiers_held

_SECOND_TIER = 1 << COPIES_BITS


@dataclass(slots=True)
class UsableChange:
    """The change in usable residency made by one batch; flags are those of `kvatlas.blocks.tiers`.

    `removed`: (blocks, previous flags), in no order of depth. `added`: blocks that became usable, parents first. `moved`:
    (blocks, previous flags) of blocks whose tiers changed. `Stretch.usable` holds the new flags.
    """

    removed: list[tuple[Stretch, int]] = field(default_factory=list)
    added: list[Stretch] = field(default_factory=list)
    moved: list[tuple[Stretch, int]] = field(default_factory=list)
    withdrawn: int = 0
    restored: int = 0


class PrefixClosure:
    """The only writer of `Stretch.usable`. `orphans`: the number of blocks that are held after a hole."""

    __slots__ = ("orphans",)

    def __init__(self) -> None:
        self.orphans = 0

    def settle(self, changed: Iterable[Stretch]) -> UsableChange:
        """Update `usable` from `copies` for the blocks whose copies changed, and for their descendants."""
        change = UsableChange()
        removed, moved, added = change.removed, change.moved, change.added
        entering: list[Stretch] = []
        for block in changed:
            copies, usable = block.copies, block.usable
            held = copies if copies <= 1 else 1 if copies < _SECOND_TIER else tiers_held(copies)
            if usable > 0:
                if not held:
                    removed.append((block, usable))
                    block.usable = 0
                elif held != usable:
                    moved.append((block, usable))
                    block.usable = held
            elif held:
                if not usable:
                    entering.append(block)
            elif usable:
                block.usable = 0
                self.orphans -= len(block)
        if removed:
            self._withdraw(change)
        for block in entering:
            parent = block.parent
            if parent is None or parent.usable > 0:
                if block.usable <= 0:  # otherwise it came with an ancestor
                    copies = block.copies
                    block.usable = 1 if copies < _SECOND_TIER else tiers_held(copies)
                    added.append(block)
                    if self.orphans and block.children is not None:
                        self._restore(block, change)
            elif block.usable == 0:
                block.usable = ORPHAN
                self.orphans += len(block)
        if change.withdrawn and moved:
            change.moved = [(block, before) for block, before in moved if block.usable > 0]
        return change

    def _withdraw(self, change: UsableChange) -> None:
        """Withdraw the blocks held after removed ones, which are no longer usable. `removed` grows during the loop."""
        removed = change.removed
        before = {id(block): flags for block, flags in change.moved}
        for block, _ in removed:
            children = block.children
            if children is None or (isinstance(children, Stretch) and children.usable <= 0):
                continue
            for child in block.iter_children():
                if child.usable > 0:
                    removed.append((child, before.get(id(child), child.usable)))
                    child.usable = ORPHAN
                    self.orphans += len(child)
                    change.withdrawn += len(child)

    def _restore(self, block: Stretch, change: UsableChange) -> None:
        """Restore the blocks held after a hole that was filled: chain by chain, parents first."""
        waiting = [child for child in block.iter_children() if child.usable == ORPHAN]
        while waiting:
            child = waiting.pop()
            child.usable = tiers_held(child.copies)
            change.added.append(child)
            self.orphans -= len(child)
            change.restored += len(child)
            waiting.extend(grandchild for grandchild in child.iter_children() if grandchild.usable == ORPHAN)
