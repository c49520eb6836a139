"""A sequence's block table: maps its tokens to physical blocks."""

from collections.abc import Iterable

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.errors import InsufficientBlocks


def count_blocks(tokens: int, block_size: int) -> int:
    """Number of blocks that hold this many tokens; the last one may be partial."""
    return -(-tokens // block_size)


class BlockTable:
    """The physical blocks of one sequence in token order, and the number of tokens in them."""

    __slots__ = ("_length", "block_ids", "block_size")

    def __init__(self, block_size: int, block_ids: Iterable[int] = (), length: int = 0) -> None:
        """Raises InsufficientBlocks if `length` tokens don't fit into `block_ids`."""
        if block_size < 1:
            raise InvalidValue(f"block_size is {block_size}; expected at least 1")
        self.block_size = block_size
        self.block_ids = list(block_ids)
        self._length = 0
        self.length = length

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.block_ids)

    @property
    def length(self) -> int:
        """Number of tokens in the blocks. Setting it raises InsufficientBlocks if they don't fit."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        if tokens < 0:
            raise InvalidValue(f"length is {tokens}; expected at least 0")
        if tokens > len(self.block_ids) * self.block_size:
            raise InsufficientBlocks(self.blocks_needed(tokens), len(self.block_ids))
        self._length = tokens

    @property
    def free_tokens(self) -> int:
        """Number of slots in the sequence's blocks that hold no token."""
        return len(self.block_ids) * self.block_size - self._length

    @property
    def has_free_space(self) -> bool:
        """True if a block has no token at all. `free_tokens` also counts the slots of a partial last block."""
        return self.blocks_needed(self._length) < len(self.block_ids)

    @property
    def logical_to_physical(self) -> dict[int, int]:
        """The physical block of each logical one: the sequence's blocks, counted from 0."""
        return dict(enumerate(self.block_ids))

    def blocks_needed(self, length: int) -> int:
        """Number of blocks that a sequence of `length` tokens needs."""
        return count_blocks(length, self.block_size)

    def slot(self, position: int) -> tuple[int, int]:
        """Physical block and slot of the token at `position`. Raises InvalidValue if there is no token at that
        position."""
        if not 0 <= position < self._length:
            raise InvalidValue(f"position is {position}; expected 0 to {self._length - 1}")
        return self.block_ids[position // self.block_size], position % self.block_size

    def head(self, blocks: int) -> "BlockTable":
        """A separate table of the first `blocks` blocks and the tokens in them."""
        return BlockTable(self.block_size, self.block_ids[:blocks], min(self._length, blocks * self.block_size))
