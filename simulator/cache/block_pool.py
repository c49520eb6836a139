"""The GPU's physical blocks: a fixed number of them, a free list, and the number of sequences that hold each block."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings for when memory is reserved; by default, all is reserved at the start and kept, as in real engines. They only
    affect statistics."""

    initial_blocks: int | None = None
    """Number of blocks reserved at the start, at most all of them; None: all. More are reserved as needed."""
    pooling: bool = True
    """True: the memory of free blocks stays reserved. False: it is returned, except for the initial blocks."""

    def __post_init__(self) -> None:
        if self.initial_blocks is not None and self.initial_blocks < 0:
            raise InvalidValue(f"initial_blocks is {self.initial_blocks}; expected at least 0")

    def initial(self, num_blocks: int) -> int:
        """Number of blocks that a cache of `num_blocks` reserves at its start."""
        return num_blocks if self.initial_blocks is None else min(self.initial_blocks, num_blocks)


class Block:
    """One physical block. `token_ids` represents the KV written to its slots."""

    __slots__ = ("block_id", "cached_at", "node", "references", "released_at", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.references = 0
        self.token_ids: list[int] = []
        self.node: PrefixNode | None = None
        """Its content in the prefix tree; None while the block is free or not full."""
        self.cached_at = 0
        self.released_at = 0


class BlockPool:
    """Hands out blocks. A block is free (in the free list), referenced, or cached without a reference.

    Memory is reserved for `initial_blocks` (None: all) from the start, and for more blocks when they are needed. With
    `pooling`, a free block's memory stays reserved for the next one; without it, the memory is returned.
    """

    def __init__(self, num_blocks: int, initial_blocks: int | None = None, *, pooling: bool = True) -> None:
        self._initial_blocks = num_blocks if initial_blocks is None else initial_blocks
        self._pooling = pooling
        self._most_blocks = 0
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = deque(range(num_blocks))
        self._referenced_blocks = 0
        self.allocations = 0
        self.deallocations = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, block_id: int) -> Block:
        return self._blocks[block_id]

    @property
    def blocks(self) -> Sequence[Block]:
        return self._blocks

    @property
    def free_ids(self) -> Sequence[int]:
        """The free list; the next block to hand out comes first."""
        return tuple(self._free)

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def referenced_blocks(self) -> int:
        """Number of blocks that sequences hold."""
        return self._referenced_blocks

    @property
    def available_blocks(self) -> int:
        """Number of blocks that no sequence holds: free ones, and cached ones that can be evicted."""
        return len(self._blocks) - self._referenced_blocks

    @property
    def reserved_blocks(self) -> int:
        """Number of blocks for which memory is reserved."""
        used = self._most_blocks if self._pooling else len(self._blocks) - len(self._free)
        return max(self._initial_blocks, used)

    def take_free(self) -> Block:
        """Take the next free block, empty and unreferenced. Raises IndexError if all are taken."""
        block = self._blocks[self._free.popleft()]
        self.allocations += 1
        self._most_blocks = max(self._most_blocks, len(self._blocks) - len(self._free))
        return block

    def give_back(self, block: Block) -> None:
        """Return an unreferenced, uncached block to the free list."""
        block.token_ids = []
        self._free.append(block.block_id)
        self.deallocations += 1

    def reference(self, block: Block) -> None:
        """Count one more sequence that holds the block."""
        block.references += 1
        if block.references == 1:
            self._referenced_blocks += 1

    def dereference(self, block: Block) -> bool:
        """Count one sequence fewer that holds the block. Returns True if it was the last one."""
        block.references -= 1
        if block.references:
            return False
        self._referenced_blocks -= 1
        return True

    def free_fragmentation(self) -> float:
        """Share of the free blocks that are outside the longest run of adjacent ones. This has to sort the free
        list."""
        if not self._free:
            return 0.0
        longest = run = 0
        previous = -2
        for block_id in sorted(self._free):
            run = run + 1 if block_id == previous + 1 else 1
            longest = max(longest, run)
            previous = block_id
        return 1 - longest / len(self._free)

    def compact(self) -> dict[int, int]:
        """Give the blocks in use the lowest ids, so that the free ones are adjacent. Returns {old id: new id} for the
        moved blocks."""
        free = set(self._free)
        used = len(self._blocks) - len(free)
        holes = sorted(block_id for block_id in free if block_id < used)
        movers = [block_id for block_id in range(used, len(self._blocks)) if block_id not in free]
        moves = dict(zip(movers, holes, strict=True))
        for old, new in moves.items():
            blocks = self._blocks
            blocks[old], blocks[new] = blocks[new], blocks[old]
            blocks[old].block_id, blocks[new].block_id = old, new
        self._free = deque(range(used, len(self._blocks)))
        return moves
