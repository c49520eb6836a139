"""A paged cache that knows only block ids: sequences, their blocks, and prefixes under the caller's own hashes, without token
ids.

`KVCache` is the strict cache: it knows what blocks contain, refuses unknown ids, and never takes a block from a live sequence.
This one is lenient, like simple engines: a sequence begins when it is first written to, a shared prefix may be appended to an
existing sequence, an unknown sequence has no tokens, and if no block is free, a block that only a single sequence holds is
taken from that sequence. Nothing else in kvatlas uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_ids.block_allocator import BlockAllocator
from kvatlas_simulator.cache.block_table import count_blocks
from kvatlas_simulator.cache.errors import InsufficientBlocks, SequenceId, SequenceNotFound
from kvatlas_simulator.cache.eviction import BlockUse, BuiltInPolicy, EvictionPolicy
from kvatlas_simulator.cache.geometry import KVGeometry


@dataclass(slots=True)
class PagedCacheStats:
    """Counters since the start. Hits: prefixes found and shared; misses: failed lookups. All others count blocks;
    `allocations` does not include copies."""

    allocations: int = 0
    deallocations: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    copies: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits among all lookups; 0 before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else 0.0


@dataclass(slots=True)
class _Held:
    """A block that has been handed out, with the number of tables and prefixes that hold it, its tokens, and its history
    in ticks."""

    references: int
    tokens: int
    allocated_at: int
    used_at: int
    uses: int = 1


class PagedCache:
    """For use by one thread. A call that raises changes nothing."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy = BuiltInPolicy.LRU,
        geometry: KVGeometry | None = None,
    ) -> None:
        self.geometry = geometry or KVGeometry()
        self.stats = PagedCacheStats()
        self._allocator = BlockAllocator(num_blocks, block_size)
        self._eviction = eviction
        self._held: dict[int, _Held] = {}
        self._tables: dict[SequenceId, list[int]] = {}
        self._prefixes: dict[int, tuple[int, ...]] = {}
        self._tick = 0

    @property
    def block_size(self) -> int:
        return self._allocator.block_size

    @property
    def total_blocks(self) -> int:
        return self._allocator.total_blocks

    @property
    def free_blocks(self) -> int:
        return self._allocator.free_blocks

    @property
    def utilisation(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return (self.total_blocks - self.free_blocks) / self.total_blocks

    @property
    def memory_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return (self.total_blocks - self.free_blocks) * self.geometry.bytes_of(self.block_size)

    @property
    def fragmentation(self) -> float:
        """Share of partial blocks among all blocks of sequences; a shared block counts once for each of its sequences. 0 if
        there are no blocks. `KVCache.stats().fragmentation` counts empty slots instead."""
        sizes = [self._held[block_id].tokens for table in self._tables.values() for block_id in table]
        return sum(tokens < self.block_size for tokens in sizes) / len(sizes) if sizes else 0.0

    def block_table(self, sequence_id: SequenceId) -> tuple[int, ...] | None:
        """The sequence's blocks; None for an unknown sequence."""
        table = self._tables.get(sequence_id)
        return None if table is None else tuple(table)

    def cached_tokens(self, sequence_id: SequenceId) -> int:
        """Tokens in the sequence's blocks, counting all but the last one as full; 0 for an unknown sequence."""
        table = self._tables.get(sequence_id)
        return (len(table) - 1) * self.block_size + self._held[table[-1]].tokens if table else 0

    # ------------------------------------------------------------ blocks of sequences

    def allocate_block(self, sequence_id: SequenceId) -> int:
        """Give the sequence one more block, which is empty. Raises InsufficientBlocks if every block is shared."""
        [block_id] = self._take(1)
        self.stats.allocations += 1
        self._tables.setdefault(sequence_id, []).append(block_id)
        return block_id

    def allocate_for_tokens(self, sequence_id: SequenceId, tokens: int) -> list[int]:
        """Give the sequence new blocks for this many tokens; the last one may be partial. Raises InsufficientBlocks."""
        if tokens < 0:
            raise InvalidValue(f"tokens is {tokens}; expected at least 0")
        block_ids = self._take(count_blocks(tokens, self.block_size))
        for at, block_id in enumerate(block_ids):
            self._held[block_id].tokens = min(self.block_size, tokens - at * self.block_size)
        if block_ids:
            self._tables.setdefault(sequence_id, []).extend(block_ids)
        self.stats.allocations += len(block_ids)
        return block_ids

    def append_token(self, sequence_id: SequenceId) -> int:
        """Append one token to the sequence, in a block that it alone holds. Returns the block. Raises InsufficientBlocks."""
        table = self._tables.get(sequence_id)
        if not table or self._held[table[-1]].tokens >= self.block_size:
            block_id = self.allocate_block(sequence_id)
            self._held[block_id].tokens = 1
            return block_id
        held = self._held[table[-1]]
        if held.references > 1:
            [copy] = self._take(1)
            self._held[copy].tokens = held.tokens
            self._release(table[-1])
            table[-1] = copy
            held = self._held[copy]
            self.stats.copies += 1
        held.tokens += 1
        self._touch(held)
        return table[-1]

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence. Raises SequenceNotFound."""
        table = self._tables.pop(sequence_id, None)
        if table is None:
            raise SequenceNotFound(sequence_id)
        for block_id in table:
            self._release(block_id)
            self.stats.deallocations += 1

    def share_prefix(self, source: SequenceId, target: SequenceId, blocks: int) -> None:
        """Append a sequence's first blocks to another sequence, which may be new. Raises SequenceNotFound, or InvalidValue if
        there are fewer."""
        table = self._tables.get(source)
        if table is None:
            raise SequenceNotFound(source)
        if not 0 <= blocks <= len(table):
            raise InvalidValue(
                f"sequence {source} has {len(table)} blocks; expected to share at most these, not {blocks}"
            )
        shared = table[:blocks]
        self._hold(shared)
        self._tables.setdefault(target, []).extend(shared)
        self.stats.hits += 1

    # ------------------------------------------------------------ prefixes

    def register_prefix(self, prefix_hash: int, block_ids: Sequence[int]) -> None:
        """Keep blocks under the caller's hash. They are held as if by another sequence: when their own sequence ends, they
        stay until their space is needed. An existing registration is replaced. Raises InvalidValue for a block that is
        free."""
        for block_id in block_ids:
            if block_id not in self._held:
                raise InvalidValue(f"block {block_id} is not allocated; expected blocks of a sequence")
        self._hold(block_ids)
        self.forget_prefix(prefix_hash)
        self._prefixes[prefix_hash] = tuple(block_ids)

    def forget_prefix(self, prefix_hash: int) -> bool:
        """Stop keeping a prefix. Returns False if it was not registered."""
        blocks = self._prefixes.pop(prefix_hash, None)
        for block_id in blocks or ():
            self._release(block_id)
        return blocks is not None

    def lookup_prefix(self, prefix_hash: int) -> tuple[int, ...] | None:
        """The blocks registered under a hash (a hit); None if there are none (a miss)."""
        blocks = self._prefixes.get(prefix_hash)
        self.stats.hits += blocks is not None
        self.stats.misses += blocks is None
        return blocks

    # ------------------------------------------------------------ pieces

    def _take(self, blocks: int) -> list[int]:
        """Take new blocks, each held once, evicting others if needed. Raises InsufficientBlocks."""
        missing = blocks - self.free_blocks
        if missing > 0:
            single = sorted(
                (self._key(held), block_id) for block_id, held in self._held.items() if held.references == 1
            )
            if missing > len(single):
                raise InsufficientBlocks(blocks, self.free_blocks + len(single))
            self._evict({block_id for _, block_id in single[:missing]})
        taken = self._allocator.allocate(blocks)
        for block_id in taken:
            self._tick += 1
            self._held[block_id] = _Held(1, 0, self._tick, self._tick)
        return taken

    def _evict(self, victims: set[int]) -> None:
        for name in [name for name, blocks in self._prefixes.items() if victims.intersection(blocks)]:
            self._prefixes[name] = tuple(one for one in self._prefixes[name] if one not in victims)
        for table in self._tables.values():
            table[:] = [block_id for block_id in table if block_id not in victims]
        for block_id in victims:
            del self._held[block_id]
        self._allocator.free(sorted(victims))
        self.stats.evictions += len(victims)

    def _key(self, held: _Held) -> tuple[float, ...]:
        return self._eviction.key(BlockUse(held.allocated_at, held.used_at, held.uses, 0))

    def _hold(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._held[block_id].references += 1

    def _release(self, block_id: int) -> None:
        held = self._held[block_id]
        held.references -= 1
        if not held.references:
            del self._held[block_id]
            self._allocator.free([block_id])

    def _touch(self, held: _Held) -> None:
        self._tick += 1
        held.used_at = self._tick
        held.uses += 1
