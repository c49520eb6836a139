"""Engine hashes that no longer stand for a block, although the engine may hold them: their adapter was reloaded, or their
blocks can't be identified."""

from collections.abc import Callable, Container, Iterable, Iterator

from kvatlas_publishers.engine_events import EngineHash
from kvatlas_publishers.ledger.block import Block
from kvatlas_publishers.ledger.lineage import Lineage


class ForgottenNames:
    """Forgets names, and names found only after their blocks. Call `drop_unnamed` after the change has been
    published."""

    def __init__(
        self,
        lineage: Lineage,
        shared: Container[EngineHash],
        on_forgotten: Callable[[EngineHash, Block], None],
    ) -> None:
        """`shared`: hashes that stand for several blocks. `on_forgotten`: called when a block is no longer held by this
        hash."""
        self._lineage = lineage
        self._shared = shared
        self._on_forgotten = on_forgotten
        self._unnamed: list[Block] = []

    def forget(self, names: Iterable[EngineHash]) -> None:
        """Forget these hashes, and those after blocks that are left without a hash. Don't call it for shared hashes."""
        for name in names:
            self.forget_after(self._forget(name))

    def forget_after(self, blocks: Iterable[Block]) -> bool:
        """Forget the hashes after those of the blocks that have no hash left. If the engine later stores the same block under
        another hash, that hash does not lead to them. Returns False if there are none."""
        later = [name for block in blocks if not block.named for name in self._names_after(block)]
        for name in later:
            self._forget(name)
        return bool(later)

    def drop_unnamed(self) -> None:
        """Drop the blocks of forgotten hashes. Call this after the change has been published."""
        if not self._unnamed:
            return
        for block in sorted(
            dict.fromkeys(self._unnamed), key=lambda block: block.index
        ):  # a leaf takes its ancestors along
            self._lineage.drop(block)
        self._unnamed.clear()

    def _forget(self, name: EngineHash) -> list[Block]:
        """Forget one hash. Returns the blocks that lost a hash."""
        lineage = self._lineage
        block = lineage.block(name)
        if block is None:
            block = lineage.variants.detached.pop(name, None)
            if block is None:
                return []
        else:
            del lineage.known[name]
            self._on_forgotten(name, block)
        lineage.mark_held(name)  # it is forgotten here
        unnamed = [block, *lineage.variants.forget(name, block)]
        for lost in unnamed:
            lost.named -= 1
        self._unnamed += unnamed
        return unnamed

    def _names_after(self, block: Block) -> Iterator[EngineHash]:
        lineage, below = self._lineage, list(block.iter_children())
        for child in below:  # grows during the loop
            for name in lineage.variants.names.get(Block(child), child.names) if child.named else ():
                if name not in self._shared and lineage.known.get(name) in (child, None):
                    yield name
            below += child.iter_children()
