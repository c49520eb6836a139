"""Physical blocks without sequences or content: the basis for a custom cache."""

from collections.abc import Sequence

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_pool import BlockPool, PoolSettings
from kvatlas_simulator.cache.errors import InsufficientBlocks


class BlockAllocator:
    """Hands out the ids of blocks, and takes them back. A call that raises changes nothing."""

    def __init__(self, num_blocks: int, block_size: int, pool: PoolSettings | None = None) -> None:
        """`block_size`: tokens per block."""
        if num_blocks < 1 or block_size < 1:
            raise InvalidValue(f"{num_blocks} blocks of {block_size} tokens; expected at least 1 of at least 1")
        pool = pool or PoolSettings()
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, pool.initial(num_blocks), pooling=pool.pooling)

    @property
    def total_blocks(self) -> int:
        return len(self._pool)

    @property
    def free_blocks(self) -> int:
        return self._pool.free_blocks

    @property
    def reserved_blocks(self) -> int:
        """Number of blocks for which memory is reserved (`PoolSettings`)."""
        return self._pool.reserved_blocks

    def __contains__(self, block_id: object) -> bool:
        """True if the block has been handed out."""
        return isinstance(block_id, int) and 0 <= block_id < len(self._pool) and self._pool[block_id].references > 0

    def allocate(self, blocks: int) -> list[int]:
        """Hand out this many blocks, starting with those that were freed earliest. Raises InsufficientBlocks if there
        are fewer."""
        if blocks < 0:
            raise InvalidValue(f"blocks is {blocks}; expected at least 0")
        if blocks > self.free_blocks:
            raise InsufficientBlocks(blocks, self.free_blocks)
        taken = [self._pool.take_free() for _ in range(blocks)]
        for block in taken:
            self._pool.reference(block)
        return [block.block_id for block in taken]

    def free(self, block_ids: Sequence[int]) -> None:
        """Take blocks back. Raises InvalidValue for a block that is not handed out, or is named twice."""
        for at, block_id in enumerate(block_ids):
            if block_id not in self or block_id in block_ids[:at]:
                raise InvalidValue(f"block {block_id} is not allocated, or freed twice")
        for block_id in block_ids:
            block = self._pool[block_id]
            self._pool.dereference(block)
            self._pool.give_back(block)

    def defragment(self) -> dict[int, int]:
        """Give the blocks that are handed out the lowest ids. Returns the new ids by the old ones, for the caller's
        tables."""
        return self._pool.compact()
