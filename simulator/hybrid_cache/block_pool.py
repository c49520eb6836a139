"""The blocks that all groups share, in vLLM's order of reuse, and their cached content."""

from collections import OrderedDict
from collections.abc import Sequence

from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.cache.kv_events import BlockRemoved, GpuCleared, KVEvent, Medium


class Content:
    """A block of tokens after one prefix, and its copies: for each group, the ids of the pool's blocks that hold it,
    oldest first."""

    __slots__ = ("block_hash", "copies", "namespace", "parent_hash", "token_ids")

    def __init__(
        self, block_hash: int, parent_hash: int | None, token_ids: tuple[int, ...], namespace: Namespace, groups: int
    ) -> None:
        self.block_hash = block_hash
        self.parent_hash = parent_hash
        self.token_ids = token_ids
        self.namespace = namespace
        self.copies: tuple[list[int], ...] = tuple([] for _ in range(groups))

    def equals(self, parent_hash: int | None, token_ids: Sequence[int], namespace: Namespace) -> bool:
        """True if the content is exactly this block, not another one with the same hash."""
        return (
            self.parent_hash == parent_hash
            and self.token_ids == tuple(token_ids)
            and self.namespace == namespace  # a salt is in the first block's hash only
        )


class Block:
    """One physical block. `group`: the group that took it last. `content`: None unless it is full and kept."""

    __slots__ = ("block_id", "content", "group", "references")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.group = 0
        self.content: Content | None = None


class SharedBlockPool:
    """Hands out blocks: first free ones without content, then the ones released longest ago, whatever their group."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = OrderedDict.fromkeys(range(num_blocks))
        self.contents: dict[int, Content] = {}
        """All content that has a copy, by hash."""
        self.events: list[KVEvent] = []
        self.allocations = 0
        self.evictions = 0
        self.cached_blocks = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def available_blocks(self) -> int:
        return len(self._free)

    def is_free(self, content: Content, group: int) -> bool:
        """True if no sequence holds the copy that a hit would take."""
        return not self._blocks[content.copies[group][0]].references

    def take(self, group: int) -> Block:
        """Take the next free block, referenced once, and evict its content. The caller must know that a block is
        free."""
        block_id, _ = self._free.popitem(last=False)
        block = self._blocks[block_id]
        if block.content is not None:
            self._evict(block)
        block.group = group
        block.references = 1
        self.allocations += 1
        return block

    def hold(self, content: Content, group: int) -> Block:
        """Reference the oldest copy of cached content once more."""
        block = self._blocks[content.copies[group][0]]
        self.hold_again(block)
        return block

    def hold_again(self, block: Block) -> None:
        if not block.references:
            del self._free[block.block_id]
        block.references += 1

    def release(self, block: Block) -> None:
        """Drop one reference; after the last one, the block is free."""
        block.references -= 1
        if not block.references:
            self._free[block.block_id] = None
            if block.content is None:
                self._free.move_to_end(block.block_id, last=False)

    def cache(self, block: Block, content: Content) -> None:
        """Record that the block now has this content."""
        self.contents[content.block_hash] = content
        content.copies[block.group].append(block.block_id)
        block.content = content
        self.cached_blocks += 1

    def clear(self) -> None:
        """Forget all content. No block may be held."""
        for block in self._blocks:
            block.content = None
        self.contents.clear()
        self.cached_blocks = 0
        self.events.append(GpuCleared())

    def _evict(self, block: Block) -> None:
        content = block.content
        assert content is not None
        content.copies[block.group].remove(block.block_id)
        if not any(content.copies):
            del self.contents[content.block_hash]
        block.content = None
        self.cached_blocks -= 1
        self.evictions += 1
        self.events.append(BlockRemoved(content.block_hash, Medium.GPU, block.group))
