"""Blocks with several engine hashes: EAGLE's pairs and lookahead also hash the token after a block.

An engine finds a block only after exactly the hash that its event names as the parent. If that hash is removed while another
one keeps the parent's block, the child is held but can't be reached. Its own hash is then **detached**: it stands for no block
until the parent's hash is held again.
"""

from collections.abc import Callable, Iterable

from kvatlas_publishers.engine_events import EngineHash
from kvatlas_publishers.ledger.block import Block


class Variants:
    """Blocks with several hashes; empty for engines without such blocks. The callers decide which hashes are held, and
    what changes when one is detached."""

    def __init__(self) -> None:
        self.names: dict[Block, dict[EngineHash, None]] = {}
        """The hashes of each block that has several."""
        self.parent_of: dict[EngineHash, EngineHash] = {}
        """The hash that each child of such a block hangs on, by the child's hash."""
        self.children_of: dict[EngineHash, dict[EngineHash, None]] = {}
        self.detached: dict[EngineHash, Block] = {}
        self._touched: dict[EngineHash, None] = {}

    def add(self, name: EngineHash, block: Block) -> None:
        """Record that `name` stands for `block`, like other hashes. The block's existing children hang on its first hash.
        None of them may be plain."""
        names = self.names.get(block)
        if names is None:
            (first_name,) = block.names
            names = self.names[block] = {first_name: None}
            for child in block.iter_children():
                for child_name in self.names.get(Block(child), child.names) if child.named else ():
                    self.hang(child_name, first_name)
        names[name] = None

    def hang(self, name: EngineHash, parent_name: EngineHash) -> None:
        """Record that the block of `name` is found after `parent_name`."""
        if self.parent_of.setdefault(name, parent_name) == parent_name:
            self.children_of.setdefault(parent_name, {})[name] = None
            self._touched[parent_name] = None

    def restore(self, links: Iterable[tuple[EngineHash, EngineHash]]) -> None:
        """Hang each hash on its saved parent hash, replacing what `add` derived from the order of the names."""
        self.parent_of.clear()
        self.children_of.clear()
        self._touched.clear()
        for name, parent_name in links:
            self.hang(name, parent_name)

    def touch(self, names: Iterable[EngineHash]) -> None:
        """Note hashes that are newly held, or no longer held."""
        self._touched.update((name, None) for name in names if name in self.children_of)

    def settle(
        self,
        is_held: Callable[[EngineHash], bool],
        detach: Callable[[EngineHash], bool],
        attach: Callable[[EngineHash], None],
    ) -> None:
        """Detach the children of hashes that are detached or not held, and attach those of all others."""
        while self._touched:
            name, _ = self._touched.popitem()
            reachable = name not in self.detached and is_held(name)
            for child in list(self.children_of.get(name, ())):
                if reachable and child in self.detached:
                    attach(child)
                elif reachable or child in self.detached or not detach(child):
                    continue
                self.touch([child])

    def forget(self, name: EngineHash, block: Block) -> list[Block]:
        """Record that `name` no longer stands for a block. Returns the blocks of the detached hashes that hung on it, one per
        hash: these hashes are forgotten too."""
        names = self.names.get(block)
        if names is not None:
            names.pop(name, None)
            if len(names) == 1:
                del self.names[block]
            block.names = (next(iter(names)),)
        if (parent_name := self.parent_of.pop(name, None)) is not None:
            self._unhang(name, parent_name)
        self._touched.pop(name, None)
        lost = []
        for child in self.children_of.pop(name, ()):
            self.parent_of.pop(child, None)
            if (child_block := self.detached.pop(child, None)) is not None:
                lost += [child_block, *self.forget(child, child_block)]
        return lost

    def _unhang(self, name: EngineHash, parent_name: EngineHash) -> None:
        children = self.children_of.get(parent_name)
        if children is not None:
            children.pop(name, None)
            if not children:
                del self.children_of[parent_name]
