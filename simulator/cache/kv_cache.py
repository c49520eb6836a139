"""A paged KV cache: block tables, prefix sharing, copy-on-write, eviction, an optional CPU tier.

Invariants, after every call:

- A block's references equal the number of block tables it is in; a free block is in no table and has no hash.
- The GPU's cached blocks are prefix-closed. With the CPU tier the union of both is too, until a reset of the GPU alone.
- The changes, folded as counts by (hash, medium), are exactly the copies that the cache holds.
- A hit is a block whose tokens and all tokens before them equal the prompt's, under the same adapter and salt.

The content is modelled by token ids: what was written to a block's slots can be read back. Sources: vLLM's block pool
and prefix caching design (full blocks only, tail freed first, duplicates kept, the last prompt token recomputed).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from simulator.cache.block_changes import BlockChange, BlockRemoved, BlocksStored, GpuCleared, Medium
from simulator.cache.block_hash import BlockHasher, Namespace
from simulator.cache.block_pool import Block, BlockPool
from simulator.cache.eviction import EvictionPolicy, EvictionQueue
from simulator.cache.host_tier import HostTier
from simulator.cache.prefix_tree import PrefixNode, PrefixTree
from simulator.cache.stats import CacheStats, MemoryPressure


class OutOfBlocks(Exception):
    """More blocks are needed than nobody holds; nothing was changed."""


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
        """`report_hits`: tell of a found block as of one that is stored, as vLLM with `kv_cache_report_mode="full"`."""
        if num_blocks < 1 or block_size < 1 or num_cpu_blocks < 0:
            raise ValueError(f"a cache of {num_blocks} + {num_cpu_blocks} blocks of {block_size} tokens is impossible")
        self.block_size = block_size
        self._policy = eviction
        self._report_hits = report_hits
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(hasher)
        self._host = HostTier(num_cpu_blocks, eviction)
        self._candidates: EvictionQueue[int] = EvictionQueue()
        self._sequences: dict[str, _Sequence] = {}
        self._changes: list[BlockChange] = []
        self._tick = 0
        self._cached_blocks = 0
        self._allocations = self._hits = self._misses = self._evictions = self._copies = 0
        self._swapped_out = self._swapped_in = self._cpu_evictions = 0

    # --- questions

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    @property
    def num_cpu_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def capacity_tokens(self) -> int:
        """Slots on the GPU: the longest sequence that can ever be held."""
        return len(self._pool) * self.block_size

    @property
    def available_blocks(self) -> int:
        """Blocks that nobody holds."""
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
        """Every block that is known by content; not all of them have a copy."""
        return tuple(self._tree)

    def stats(self) -> CacheStats:
        """Counters and gauges of now; costs a walk over the live sequences."""
        return CacheStats(
            allocations=self._allocations,
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            copies=self._copies,
            swapped_out=self._swapped_out,
            swapped_in=self._swapped_in,
            cpu_evictions=self._cpu_evictions,
            utilisation=self.utilisation,
            fragmentation=self._fragmentation(),
            cached_blocks=self._cached_blocks,
            cpu_blocks=len(self._host),
        )

    def match(self, token_ids: Sequence[int], namespace: Namespace, earlier: PrefixMatch | None = None) -> PrefixMatch:
        """How much of a prompt is cached. The last token never counts: it has to be computed to get an output.

        `earlier`: a match of the same prompt from before; what still holds of it needn't be looked up again.
        """
        size = self.block_size
        limit = max(len(token_ids) - 1, 0) // size
        # A node that was forgotten has no copy, also when its block was cached anew since, as another node.
        nodes = [] if earlier is None else list(takewhile(lambda node: node.resident, earlier.nodes))
        parent = nodes[-1] if nodes else None
        for index in range(len(nodes), limit):
            block = tuple(token_ids[index * size : (index + 1) * size])
            node = self._tree.find(parent, block, namespace)
            if node is None or not node.resident:
                break
            nodes.append(node)
            parent = node
        return PrefixMatch(len(token_ids), namespace, tuple(nodes), len(nodes) * size, limit)

    def can_open(self, match: PrefixMatch, new_tokens: int) -> bool:
        """Whether `open(match)` and then writing `new_tokens` will find blocks enough."""
        taken = sum(
            1 for node in match.nodes if not node.gpu_block_ids or not self._pool[node.gpu_block_ids[0]].references
        )
        return taken + -(-new_tokens // self.block_size) <= self._pool.available_blocks

    def swap_ins(self, match: PrefixMatch) -> int:
        """Blocks that `open(match)` brings back from the CPU."""
        return sum(1 for node in match.nodes if not node.gpu_block_ids)

    # --- sequences

    def open(self, sequence_id: str, match: PrefixMatch, *, count_lookup: bool = True) -> None:
        """Begin a sequence with the blocks of a match that was taken from the cache as it is now.

        Raises OutOfBlocks where blocks on the CPU don't fit onto the GPU, ValueError for an id in use.
        `count_lookup`: whether hits and misses are counted (not when a preempted sequence comes back).
        """
        self._check_new(sequence_id)
        if not self.can_open(match, 0):
            raise OutOfBlocks(f"{len(match.nodes)} blocks of the prefix of {sequence_id!r} don't fit")
        table: list[int] = []
        for node in match.nodes:
            node.hits += 1
            if node.gpu_block_ids:
                block = self._pool[node.gpu_block_ids[0]]
                self._pool.reference(block)
                self._settle(node)
                table.append(block.block_id)
        if self._report_hits and table:
            self._changes.append(self._stored(match.nodes[: len(table)], Medium.GPU))
        table += self._swap_in(match.nodes[len(table) :])
        self._sequences[sequence_id] = _Sequence(match.namespace, table, list(match.nodes), match.hit_tokens)
        if count_lookup:
            self._hits += len(match.nodes)
            self._misses += match.lookup_blocks - len(match.nodes)

    def write(self, sequence_id: str, token_ids: Sequence[int]) -> bool:
        """Append computed tokens; full blocks are cached at once. False, and nothing changed, when blocks are lacking."""
        sequence = self._sequences[sequence_id]
        size = self.block_size
        tail = self._pool[sequence.table[-1]] if sequence.tokens % size else None
        shared = tail is not None and tail.references > 1 and bool(token_ids)
        added = -(-(sequence.tokens + len(token_ids)) // size) - len(sequence.table)
        if added + shared > self._pool.available_blocks:
            return False
        if tail is not None and shared:
            self._copy_on_write(sequence, tail)
        # All blocks before any is cached, so that removals come before stores, as in vLLM.
        sequence.table += [self._allocate().block_id for _ in range(added)]
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
        """Begin a sequence that shares all blocks of another, the partial last one too until either writes to it."""
        self._check_new(new_sequence_id)
        source = self._sequences[sequence_id]
        for block_id in source.table:
            self._pool.reference(self._pool[block_id])
        self._sequences[new_sequence_id] = _Sequence(
            source.namespace, list(source.table), list(source.nodes), source.tokens
        )

    def release(self, sequence_id: str) -> None:
        """End a sequence. Its full blocks stay cached until their room is needed."""
        sequence = self._sequences.pop(sequence_id)
        for block_id in reversed(sequence.table):
            block = self._pool[block_id]
            if not self._pool.dereference(block):
                continue
            if block.node is None:
                self._pool.give_back(block)
            else:
                self._tick += 1
                block.released_at = self._tick
                self._settle(block.node)

    def read(self, sequence_id: str) -> list[int]:
        """The tokens in a sequence's blocks, read through its block table."""
        return [token for block_id in self._sequences[sequence_id].table for token in self._pool[block_id].token_ids]

    # --- the cache as a whole

    def reset(self, *, include_cpu: bool = False) -> bool:
        """Drop every cached block of the GPU, and of the CPU if asked. False, and nothing changed, while any is held."""
        if self._pool.referenced_blocks:
            return False
        for block in self._pool.blocks:
            if block.node is not None:
                self._candidates.discard(block.block_id)
                block.node.gpu_block_ids.clear()
                block.node = None
                self._pool.give_back(block)
        for node in self._tree:
            node.gpu_children = 0
        self._cached_blocks = 0
        self._changes.append(GpuCleared())
        if include_cpu:
            for node in self._host.nodes():
                self._drop_cpu_copy(node)
        for node in self._tree:
            self._tree.prune(node)
        for node in self._host.nodes():
            self._host.settle(node)
        return True

    def take_changes(self) -> tuple[BlockChange, ...]:
        """What happened to blocks since the last call, in order."""
        changes = tuple(self._changes)
        self._changes.clear()
        return changes

    # --- inside

    def _check_new(self, sequence_id: str) -> None:
        if sequence_id in self._sequences:
            raise ValueError(f"sequence {sequence_id!r} is open already")

    def _allocate(self) -> Block:
        """A free block with one reference, evicting if there is none; the caller knows that one is available."""
        if not self._pool.has_free:
            self._evict()
        block = self._pool.take_free()
        self._pool.reference(block)
        self._allocations += 1
        return block

    def _evict(self) -> None:
        block = self._pool[self._candidates.pop()]
        node = block.node
        assert node is not None and not block.references
        if len(node.gpu_block_ids) == 1 and not node.on_cpu:
            self._swap_out(node)
        node.gpu_block_ids.remove(block.block_id)
        self._candidates.discard(block.block_id)  # making room on the CPU may have settled this node once more
        block.node = None
        self._cached_blocks -= 1
        self._evictions += 1
        self._changes.append(BlockRemoved(node.block_hash, Medium.GPU))
        self._pool.give_back(block)
        if not node.gpu_block_ids and node.parent is not None:
            node.parent.gpu_children -= 1
        if not node.resident:
            # Only when every CPU copy was being read: what lies behind on the CPU can't be reached any more.
            for descendant in node.descendants():
                if descendant.on_cpu:
                    self._drop_cpu_copy(descendant)
                    self._cpu_evictions += 1
                self._tree.prune(descendant)
        self._forget(node)

    def _swap_out(self, node: PrefixNode) -> None:
        """Copy a node that leaves the GPU to the CPU, if the tier has room or can make it."""
        if not self._host.num_blocks:
            return
        if self._host.full:
            victim = self._host.take_victim()
            if victim is None:
                return
            self._drop_cpu_copy(victim)
            self._cpu_evictions += 1
            self._forget(victim)
        self._tick += 1
        self._host.store(node, self._tick)
        self._swapped_out += 1
        self._changes.append(self._stored([node], Medium.CPU))

    def _swap_in(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Give nodes that are only on the CPU a block on the GPU, held by the caller; the CPU copies stay."""
        for node in nodes:
            node.pinned = True
            self._host.settle(node)
        blocks = []
        for node in nodes:
            block = self._allocate()
            block.token_ids = list(node.token_ids)
            self._cache(block, node)
            blocks.append(block.block_id)
        for node in nodes:
            node.pinned = False
            self._tick += 1
            self._host.touch(node, self._tick)
        if nodes:
            self._swapped_in += len(nodes)
            self._changes.append(self._stored(nodes, Medium.GPU))
        return blocks

    def _copy_on_write(self, sequence: _Sequence, tail: Block) -> None:
        copy = self._allocate()
        copy.token_ids = list(tail.token_ids)
        self._pool.dereference(tail)
        sequence.table[-1] = copy.block_id
        self._copies += 1

    def _cache_full_blocks(self, sequence: _Sequence) -> None:
        """Give every newly full block its hash. After a collision the rest of the sequence stays uncached."""
        fresh: list[PrefixNode] = []
        for index in range(len(sequence.nodes), sequence.tokens // self.block_size):
            block = self._pool[sequence.table[index]]
            parent = sequence.nodes[index - 1] if index else None
            node = self._tree.find_or_add(parent, tuple(block.token_ids), sequence.namespace)
            if node is None:
                break
            self._cache(block, node)
            sequence.nodes.append(node)
            fresh.append(node)
        if fresh:
            self._changes.append(self._stored(fresh, Medium.GPU))

    def _cache(self, block: Block, node: PrefixNode) -> None:
        self._tick += 1
        block.node = node
        block.cached_at = self._tick
        node.gpu_block_ids.append(block.block_id)
        self._cached_blocks += 1
        if len(node.gpu_block_ids) == 1 and node.parent is not None:
            node.parent.gpu_children += 1
            self._settle(node.parent)
        self._settle(node)

    def _settle(self, node: PrefixNode) -> None:
        """Bring a node's copies into, or out of, both tiers' candidates; call when anything about it has changed."""
        spare = len(node.gpu_block_ids) > 1 or not node.gpu_children
        for block_id in node.gpu_block_ids:
            block = self._pool[block_id]
            if spare and not block.references:
                key = self._policy.key(cached_at=block.cached_at, released_at=block.released_at, hits=node.hits)
                self._candidates.put(block_id, key)
            else:
                self._candidates.discard(block_id)
        self._host.settle(node)

    def _forget(self, node: PrefixNode) -> None:
        """A copy of this node went: drop it from the tree if that was all, and settle who is left above it."""
        if node.resident or node.children:
            self._settle(node)
        if node.parent is not None:
            self._settle(node.parent)
        left = self._tree.prune(node)
        if left is not None and left is not node:
            self._settle(left)

    def _drop_cpu_copy(self, node: PrefixNode) -> None:
        self._host.remove(node)
        self._changes.append(BlockRemoved(node.block_hash, Medium.CPU))

    def _stored(self, nodes: Sequence[PrefixNode], medium: Medium) -> BlocksStored:
        return BlocksStored(
            block_hashes=tuple(node.block_hash for node in nodes),
            parent_hash=nodes[0].parent_hash,
            token_ids=tuple(token for node in nodes for token in node.token_ids),
            medium=medium,
            adapter=nodes[0].namespace.adapter,
            extra_keys=tuple(node.extra_keys for node in nodes),
        )

    def _fragmentation(self) -> float:
        slots = self._pool.referenced_blocks * self.block_size
        if not slots:
            return 0.0
        tails = {sequence.table[-1] for sequence in self._sequences.values() if sequence.table}
        return sum(self.block_size - len(self._pool[block_id].token_ids) for block_id in tails) / slots
