"""A paged KV cache: block tables of live sequences over the prefix cache, with prefix sharing and copy-on-write.

Invariants, after every call:

- A block's references equal the number of block tables it is in; a free block is in no table and has no hash.
- The GPU's cached blocks are prefix-closed. With the CPU tier the union of both is too, until a reset of the GPU alone.
- The events, folded as counts by (hash, medium), are exactly the copies that the cache holds.
- A hit is a block whose tokens and all tokens before them equal the prompt's, under the same adapter and salt.

The content is modelled by token ids: what was written to a block's slots can be read back. Sources: vLLM's block pool
and prefix caching design (full blocks only, tail freed first, duplicates kept, the last prompt token recomputed).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from simulator.cache.block_hash import BlockHasher, Namespace
from simulator.cache.block_pool import Block, BlockPool
from simulator.cache.cpu_tier import CpuTier
from simulator.cache.eviction import EvictionPolicy
from simulator.cache.kv_events import KVEvent
from simulator.cache.prefix_cache import PrefixCache
from simulator.cache.prefix_tree import PrefixNode
from simulator.cache.stats import CacheStats, MemoryPressure


class OutOfBlocks(Exception):
    """The call needs more blocks than are available; it changed nothing."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt; valid until the cache changes."""

    prompt_tokens: int
    namespace: Namespace
    nodes: tuple[PrefixNode, ...]
    hit_tokens: int
    lookup_blocks: int
    """Full blocks of the prompt that a hit could have covered."""


@dataclass(slots=True)
class _Sequence:
    namespace: Namespace
    table: list[int] = field(default_factory=list)
    nodes: list[PrefixNode] = field(default_factory=list)
    """Of its leading full blocks; shorter than the table's full blocks only after a hash collision."""
    tokens: int = 0


class KVCache:
    """Block tables of live sequences over a fixed pool of GPU blocks. Synchronous; no clock, no I/O."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher,
        eviction: EvictionPolicy = EvictionPolicy.LRU,
        num_cpu_blocks: int = 0,
        report_hits: bool = False,
    ) -> None:
        """`report_hits`: record a stored event for each hit on the GPU, as vLLM with `kv_cache_report_mode="full"`."""
        if num_blocks < 1 or block_size < 1 or num_cpu_blocks < 0:
            raise ValueError(f"a cache of {num_blocks} + {num_cpu_blocks} blocks of {block_size} tokens is impossible")
        self.block_size = block_size
        self.num_cpu_blocks = num_cpu_blocks
        self._pool = BlockPool(num_blocks)
        self._prefix_cache = PrefixCache(
            self._pool, CpuTier(num_cpu_blocks, eviction), hasher=hasher, policy=eviction, report_hits=report_hits
        )
        self._sequences: dict[str, _Sequence] = {}
        self._hits = self._misses = self._copies = 0

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    @property
    def capacity_tokens(self) -> int:
        """Slots on the GPU: the longest sequence that fits."""
        return len(self._pool) * self.block_size

    @property
    def available_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.available_blocks

    @property
    def utilisation(self) -> float:
        """GPU blocks that sequences hold, of all: 0..1."""
        return self._pool.referenced_blocks / len(self._pool)

    @property
    def pressure(self) -> MemoryPressure:
        return MemoryPressure.of(self.utilisation)

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Every block that is known by content; some have no copy."""
        return self._prefix_cache.nodes

    def stats(self) -> CacheStats:
        """Counters, and gauges of now; costs a walk over the live sequences."""
        cached = self._prefix_cache
        return CacheStats(
            allocations=cached.allocations,
            hits=self._hits,
            misses=self._misses,
            evictions=cached.evictions,
            copies=self._copies,
            swapped_out=cached.swapped_out,
            swapped_in=cached.swapped_in,
            cpu_evictions=cached.cpu_evictions,
            utilisation=self.utilisation,
            fragmentation=self._fragmentation(),
            cached_blocks=cached.cached_blocks,
            cpu_blocks=cached.cpu_blocks,
        )

    def match(self, token_ids: Sequence[int], namespace: Namespace, earlier: PrefixMatch | None = None) -> PrefixMatch:
        """Find how much of a prompt is cached. The last token never counts: it is computed to get an output.

        `earlier`: an older match of the same prompt; the part that still holds is not looked up again.
        """
        size = self.block_size
        limit = max(len(token_ids) - 1, 0) // size
        # A pruned node has no copy, even if its block was cached again since: that is another node.
        nodes = [] if earlier is None else list(takewhile(lambda node: node.resident, earlier.nodes))
        parent = nodes[-1] if nodes else None
        for index in range(len(nodes), limit):
            node = self._prefix_cache.find(parent, tuple(token_ids[index * size : (index + 1) * size]), namespace)
            if node is None:
                break
            nodes.append(node)
            parent = node
        return PrefixMatch(len(token_ids), namespace, tuple(nodes), len(nodes) * size, limit)

    def can_open(self, match: PrefixMatch, new_tokens: int) -> bool:
        """Whether enough blocks are available for `open(match)` and then for writing `new_tokens`."""
        taken = sum(
            1 for node in match.nodes if not node.gpu_block_ids or not self._pool[node.gpu_block_ids[0]].references
        )
        return taken + -(-new_tokens // self.block_size) <= self._pool.available_blocks

    def swap_ins(self, match: PrefixMatch) -> int:
        """Blocks that `open(match)` brings back from the CPU."""
        return sum(1 for node in match.nodes if not node.gpu_block_ids)

    def open(self, sequence_id: str, match: PrefixMatch, *, count_lookup: bool = True) -> None:
        """Begin a sequence with the blocks of a match that is still valid.

        Raises OutOfBlocks if blocks on the CPU don't fit onto the GPU, ValueError for an id in use.
        `count_lookup`: whether hits and misses are counted (not when a preempted sequence comes back).
        """
        self._check_new(sequence_id)
        if not self.can_open(match, 0):
            raise OutOfBlocks(f"{len(match.nodes)} blocks of the prefix of {sequence_id!r} don't fit")
        table = self._prefix_cache.hold(match.nodes)
        self._sequences[sequence_id] = _Sequence(match.namespace, table, list(match.nodes), match.hit_tokens)
        if count_lookup:
            self._hits += len(match.nodes)
            self._misses += match.lookup_blocks - len(match.nodes)

    def write(self, sequence_id: str, token_ids: Sequence[int]) -> bool:
        """Append computed tokens; full blocks are cached at once. False, and nothing changed, if blocks are lacking."""
        sequence = self._sequences[sequence_id]
        size = self.block_size
        tail = self._pool[sequence.table[-1]] if sequence.tokens % size else None
        shared = tail is not None and tail.references > 1 and bool(token_ids)
        added = -(-(sequence.tokens + len(token_ids)) // size) - len(sequence.table)
        if added + shared > self._pool.available_blocks:
            return False
        if tail is not None and shared:
            self._copy_on_write(sequence, tail)
        # All blocks are allocated before any is cached, so that removals come before stores, as in vLLM.
        sequence.table += [self._prefix_cache.allocate().block_id for _ in range(added)]
        written = 0
        while written < len(token_ids):
            block = self._pool[sequence.table[sequence.tokens // size]]
            piece = token_ids[written : written + size - len(block.token_ids)]
            block.token_ids.extend(piece)
            written += len(piece)
            sequence.tokens += len(piece)
        self._cache_full_blocks(sequence)
        return True

    def fork(self, sequence_id: str, new_sequence_id: str) -> None:
        """Begin a sequence that shares all blocks of another, also the partial last one until either writes to it."""
        self._check_new(new_sequence_id)
        source = self._sequences[sequence_id]
        for block_id in source.table:
            self._pool.reference(self._pool[block_id])
        self._sequences[new_sequence_id] = _Sequence(
            source.namespace, list(source.table), list(source.nodes), source.tokens
        )

    def release(self, sequence_id: str) -> None:
        """End a sequence. Its full blocks stay cached until their room is needed."""
        for block_id in reversed(self._sequences.pop(sequence_id).table):
            self._prefix_cache.release(self._pool[block_id])

    def read(self, sequence_id: str) -> list[int]:
        """The tokens in a sequence's blocks, read through its block table."""
        return [token for block_id in self._sequences[sequence_id].table for token in self._pool[block_id].token_ids]

    def reset(self, *, include_cpu: bool = False) -> bool:
        """Drop every cached block of the GPU, and of the CPU if asked. False, and nothing changed, if a sequence holds any."""
        if self._pool.referenced_blocks:
            return False
        self._prefix_cache.clear(include_cpu=include_cpu)
        return True

    def take_events(self) -> tuple[KVEvent, ...]:
        """The events since the last call, in order."""
        return self._prefix_cache.take_events()

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id!r} is open already")

    def _copy_on_write(self, sequence: _Sequence, tail: Block) -> None:
        copy = self._prefix_cache.allocate()
        copy.token_ids = list(tail.token_ids)
        self._pool.dereference(tail)
        sequence.table[-1] = copy.block_id
        self._copies += 1

    def _cache_full_blocks(self, sequence: _Sequence) -> None:
        """Cache the newly full blocks. After a hash collision the rest of the sequence stays uncached."""
        cached = len(sequence.nodes)
        full = [self._pool[block_id] for block_id in sequence.table[cached : sequence.tokens // self.block_size]]
        parent = sequence.nodes[-1] if sequence.nodes else None
        sequence.nodes += self._prefix_cache.store(parent, full, sequence.namespace)

    def _fragmentation(self) -> float:
        slots = self._pool.referenced_blocks * self.block_size
        if not slots:
            return 0.0
        tails = {sequence.table[-1] for sequence in self._sequences.values() if sequence.table}
        return sum(self.block_size - len(self._pool[block_id].token_ids) for block_id in tails) / slots
