"""The prefix cache: full blocks, found by content, on the GPU and in an optional CPU tier.

A cached block stays until its space is needed, whether or not a sequence holds it. Blocks leave the GPU from a sequence's
tail; with a CPU tier they are swapped out to it, and back in at the next hit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace
from kvatlas_simulator.cache.block_pool import Block, BlockPool
from kvatlas_simulator.cache.cpu_tier import CpuTier
from kvatlas_simulator.cache.errors import InsufficientBlocks
from kvatlas_simulator.cache.eviction import BlockUse, EvictionKey, EvictionPolicy, EvictionQueue
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent, Medium
from kvatlas_simulator.cache.prefix_tree import PrefixNode, PrefixTree


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Settings for cached prefixes. By default, all are cached until their space is needed, as in real engines."""

    sharing: bool = True
    """If off, nothing is cached or found, but forks still share their blocks."""
    min_tokens: int = 0
    """Prefixes shorter than this are neither cached nor found."""
    max_prefixes: int | None = None
    """Maximum number of distinct prefixes (chains of blocks that no cached block continues). Beyond that, the prefix
    that the policy would evict first is dropped, except for blocks that another prefix shares. Prefixes of live
    sequences always stay."""
    ttl_s: float | None = None
    """A prefix that no sequence has held for this many seconds is no longer found, and is dropped by `gc`."""

    def __post_init__(self) -> None:
        if self.min_tokens < 0:
            raise InvalidValue(f"min_tokens is {self.min_tokens}; expected at least 0")
        if self.max_prefixes is not None and self.max_prefixes < 1:
            raise InvalidValue(f"max_prefixes is {self.max_prefixes}; expected at least 1, or sharing off")
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise InvalidValue(f"ttl_s is {self.ttl_s}; expected more than 0")


class PrefixCache:
    """Allocates the pool's blocks and caches, evicts and swaps the full ones. Records every change as a KV event.

    Its counters count blocks since the start; `cached_blocks` and `cpu_blocks` are current values.
    """

    def __init__(
        self,
        pool: BlockPool,
        cpu_tier: CpuTier,
        *,
        hasher: BlockHasher,
        policy: EvictionPolicy,
        settings: PrefixSettings,
        clock: Callable[[], float],
        report_hits: bool,
    ) -> None:
        """`report_hits`: record a stored event for each hit on the GPU, like vLLM with `kv_cache_report_mode="full"`."""
        self._pool = pool
        self._cpu_tier = cpu_tier
        self._policy = policy
        self.settings = settings
        self._clock = clock
        self._report_hits = report_hits
        self._tree = PrefixTree(hasher)
        self._candidates: EvictionQueue[int] = EvictionQueue()
        self._events: list[KVEvent] = []
        self._tick = 0
        self.cached_blocks = 0
        self.evictions = 0
        self.swapped_out = 0
        self.swapped_in = 0
        self.cpu_evictions = 0

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Every block whose content is known; some have no copy."""
        return tuple(self._tree)

    @property
    def cpu_blocks(self) -> int:
        return len(self._cpu_tier)

    @property
    def swap_blocks(self) -> int:
        return self._cpu_tier.swap_blocks

    @property
    def cached_prefixes(self) -> int:
        return len(self._tree.leaves)

    def find(self, parent: PrefixNode | None, token_ids: tuple[int, ...], namespace: Namespace) -> PrefixNode | None:
        """The node for this block after `parent`, if it can be used."""
        node = self._tree.find(parent, token_ids, namespace)
        return node if node is not None and self.usable(node) else None

    def usable(self, node: PrefixNode) -> bool:
        """True if the node has a copy and has not expired."""
        return node.resident and not self._expired(node)

    def allocate(self) -> Block:
        """Return an empty block with one reference; evicts a block if none is free. The caller must know that one is
        available."""
        if not self._pool.free_blocks:
            self._evict()
        block = self._pool.take_free()
        self._pool.reference(block)
        return block

    def hold(self, prefix: Sequence[PrefixNode]) -> list[int]:
        """Reference the blocks of a resident prefix and return their ids. Swaps in blocks that are only on the CPU; the
        caller must know that they fit."""
        block_ids: list[int] = []
        for node in prefix:
            node.hits += 1
            self._touch(node)
            if node.gpu_block_ids:
                block_id = node.gpu_block_ids[0]
                self._pool.reference(self._pool[block_id])
                if len(node.gpu_block_ids) == 1 and not node.on_cpu:
                    self._candidates.discard(block_id)
                else:
                    self._update_candidates(node)  # a hit moves the other copies too
                block_ids.append(block_id)
        if self._report_hits and block_ids:
            self._events.append(_stored(prefix[: len(block_ids)], Medium.GPU))
        return block_ids + self._swap_in(prefix[len(block_ids) :])

    def store(self, parent: PrefixNode | None, blocks: Sequence[Block], namespace: Namespace) -> list[PrefixNode]:
        """Cache full blocks that follow `parent`, head first. Returns their nodes, fewer than blocks after a hash
        collision."""
        nodes: list[PrefixNode] = []
        stored: list[PrefixNode] = []
        for block in blocks:
            node = block.node  # a fork that shares the block may have cached it
            if node is None:
                node = self._tree.find_or_add(parent, tuple(block.token_ids), namespace)
                if node is None:
                    break
                self._add_copy(block, node)
                stored.append(node)
            nodes.append(node)
            parent = node
        if stored:
            self._events.append(_stored(stored, Medium.GPU))
            self.limit_prefixes()
        return nodes

    def release(self, block: Block) -> None:
        """Drop one sequence's reference. After the last one, a cached block may be evicted, and any other block becomes
        free."""
        if not self._pool.dereference(block):
            return
        if block.node is None:
            self._pool.give_back(block)
        else:
            self._tick += 1
            block.released_at = self._tick
            self._touch(block.node)
            self._update_candidates(block.node)

    def clear(self, *, include_cpu: bool) -> None:
        """Drop every cached block of the GPU, and of the CPU if requested. No sequence may hold a block."""
        for block in self._pool.blocks:
            if block.node is not None:
                self._candidates.discard(block.block_id)
                block.node.gpu_block_ids.clear()
                block.node = None
                self._pool.give_back(block)
        for node in self._tree:
            node.gpu_children = 0
        self.cached_blocks = 0
        self._events.append(GpuCleared())
        if include_cpu:
            for node in self._cpu_tier.nodes():
                self._drop_cpu_copy(node)
        for node in self._tree:
            self._tree.prune(node)
        for node in self._cpu_tier.nodes():
            self._cpu_tier.update_candidate(node)

    def limit_prefixes(self) -> None:
        """Drop prefixes until their number is within the settings' limit. Each drop walks over all prefixes."""
        limit = self.settings.max_prefixes
        while limit is not None and len(self._tree.leaves) > limit:
            droppable = [leaf for leaf in self._tree.leaves if self._removable(leaf)]
            if not droppable:
                return
            blocks, cpu_blocks = self.cached_blocks, self.cpu_blocks
            self._drop_tail(min(droppable, key=self._prefix_key), lambda node: not self._held(node))
            self.evictions += blocks - self.cached_blocks
            self.cpu_evictions += cpu_blocks - self.cpu_blocks

    def drop_expired(self) -> None:
        """Drop every copy of expired blocks. Blocks that continue an expired block have expired too."""
        for leaf in tuple(self._tree.leaves):
            self._drop_tail(leaf, self._expired)

    def evict_down_to(self, blocks: int) -> None:
        """Evict cached blocks that no sequence holds, as if their space were needed, until at most this many are left."""
        while self._pool.available_blocks - self._pool.free_blocks > blocks:
            self._evict()

    def reserve_swap(self, blocks: int) -> None:
        """Reserve CPU blocks for a swapped-out sequence; evicts cached ones. Raises InsufficientBlocks."""
        tier = self._cpu_tier
        if blocks > tier.num_blocks - tier.swap_blocks:
            raise InsufficientBlocks(blocks, tier.num_blocks - tier.swap_blocks)
        while tier.room < blocks:
            self._evict_from_cpu()
        tier.swap_blocks += blocks

    def release_swap(self, blocks: int) -> None:
        """Return reserved CPU blocks."""
        self._cpu_tier.swap_blocks -= blocks

    def compact(self) -> dict[int, int]:
        """Move blocks so that the free ones are adjacent. Returns the new ids by the old ones, for the block tables."""
        moves = self._pool.compact()
        for old, new in moves.items():
            self._candidates.discard(old)
            node = self._pool[new].node
            if node is not None:
                node.gpu_block_ids[node.gpu_block_ids.index(old)] = new
        for new in moves.values():
            node = self._pool[new].node
            if node is not None:
                self._update_candidates(node)
        return moves

    def take_events(self) -> tuple[KVEvent, ...]:
        """The events since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def _add_copy(self, block: Block, node: PrefixNode) -> None:
        self._tick += 1
        block.node = node
        block.cached_at = self._tick
        node.gpu_block_ids.append(block.block_id)
        self.cached_blocks += 1
        self._touch(node)
        if len(node.gpu_block_ids) == 1 and node.parent is not None:
            node.parent.gpu_children += 1
            self._update_candidates(node.parent)
        self._update_candidates(node)

    def _evict(self) -> None:
        block = self._pool[self._candidates.pop()]
        node = block.node
        assert node is not None and not block.references
        if len(node.gpu_block_ids) == 1 and not node.on_cpu:
            self._swap_out(node)
        self._drop_gpu_copy(block, node)
        self.evictions += 1
        if not node.resident:
            # happens only if every CPU copy was being read: the CPU copies after this block are unreachable now
            for descendant in node.descendants():
                if descendant.on_cpu:
                    self._drop_cpu_copy(descendant)
                    self.cpu_evictions += 1
                self._tree.prune(descendant)
        self._prune(node)

    def _swap_out(self, node: PrefixNode) -> None:
        """Copy a node to the CPU tier as it leaves the GPU, if the tier has room or can make some."""
        if self._cpu_tier.room < 1 and not self._evict_from_cpu():
            return
        self._tick += 1
        self._cpu_tier.store(node, self._tick)
        self.swapped_out += 1
        self._events.append(_stored([node], Medium.CPU))

    def _evict_from_cpu(self) -> bool:
        """Make room for one block on the CPU. Returns False if every copy must stay."""
        victim = self._cpu_tier.take_victim()
        if victim is None:
            return False
        self._drop_cpu_copy(victim)
        self.cpu_evictions += 1
        self._prune(victim)
        return True

    def _swap_in(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Give nodes that are only on the CPU a GPU block, held by the caller; the CPU copies stay."""
        for node in nodes:
            node.pinned = True
            self._cpu_tier.update_candidate(node)
        block_ids = []
        for node in nodes:
            block = self.allocate()
            block.token_ids = list(node.token_ids)
            self._add_copy(block, node)
            block_ids.append(block.block_id)
        for node in nodes:
            node.pinned = False
            self._tick += 1
            self._cpu_tier.touch(node, self._tick)
        if nodes:
            self.swapped_in += len(nodes)
            self._events.append(_stored(nodes, Medium.GPU))
        return block_ids

    def _update_candidates(self, node: PrefixNode) -> None:
        """Update which copies of a node may be evicted, in both tiers. Call after any change to the node."""
        spare = len(node.gpu_block_ids) > 1 or not node.gpu_children
        for block_id in node.gpu_block_ids:
            block = self._pool[block_id]
            if spare and not block.references:
                self._candidates.put(block_id, self._key(block, node))
            else:
                self._candidates.discard(block_id)
        if node.on_cpu:
            self._cpu_tier.update_candidate(node)

    def _prune(self, node: PrefixNode) -> None:
        """Call after a node has lost a copy. Drops the node from the tree if it was the last one, and in any case updates
        the nodes above it."""
        if node.resident or node.children:
            self._update_candidates(node)
        if node.parent is not None:
            self._update_candidates(node.parent)
        remaining = self._tree.prune(node)
        if remaining is not None and remaining is not node:
            self._update_candidates(remaining)

    def _drop_tail(self, leaf: PrefixNode, droppable: Callable[[PrefixNode], bool]) -> None:
        """Drop all copies of a leaf, and of the blocks before it that become leaves, as long as they are droppable."""
        node: PrefixNode | None = leaf
        while node is not None and not node.children and (not node.resident or droppable(node)):
            parent = node.parent
            for block_id in tuple(node.gpu_block_ids):
                self._drop_gpu_copy(self._pool[block_id], node)
            if node.on_cpu:
                self._drop_cpu_copy(node)
            self._prune(node)
            node = parent

    def _drop_gpu_copy(self, block: Block, node: PrefixNode) -> None:
        node.gpu_block_ids.remove(block.block_id)
        # usually it is no longer a candidate, unless making room on the CPU made it one again, or it was not taken from the
        # queue
        self._candidates.discard(block.block_id)
        block.node = None
        self.cached_blocks -= 1
        self._events.append(BlockRemoved(node.block_hash, Medium.GPU))
        self._pool.give_back(block)
        if not node.gpu_block_ids and node.parent is not None:
            node.parent.gpu_children -= 1

    def _key(self, block: Block, node: PrefixNode) -> EvictionKey:
        return self._policy.key(BlockUse(block.cached_at, block.released_at, node.hits, node.depth))

    def _prefix_key(self, leaf: PrefixNode) -> EvictionKey:
        """A prefix's place in the order of dropping: that of its last block's best copy."""
        if not leaf.gpu_block_ids:
            return self._cpu_tier.key(leaf)
        return max(self._key(self._pool[block_id], leaf) for block_id in leaf.gpu_block_ids)

    def _removable(self, leaf: PrefixNode) -> bool:
        """True if no sequence holds the part that belongs only to this prefix. Otherwise dropping its end would not reduce the
        number of prefixes."""
        node: PrefixNode | None = leaf
        while node is not None and not self._held(node):
            if node.parent is not None and len(node.parent.children) > 1:
                return True
            node = node.parent
        return node is None

    def _held(self, node: PrefixNode) -> bool:
        return any(self._pool[block_id].references for block_id in node.gpu_block_ids)

    def _touch(self, node: PrefixNode) -> None:
        if self.settings.ttl_s is not None:
            node.used_at = self._clock()

    def _expired(self, node: PrefixNode) -> bool:
        ttl_s = self.settings.ttl_s
        return ttl_s is not None and not self._held(node) and self._clock() - node.used_at >= ttl_s

    def _drop_cpu_copy(self, node: PrefixNode) -> None:
        self._cpu_tier.remove(node)
        self._events.append(BlockRemoved(node.block_hash, Medium.CPU))


def _stored(nodes: Sequence[PrefixNode], medium: Medium) -> BlocksStored:
    return BlocksStored(
        block_hashes=tuple(node.block_hash for node in nodes),
        parent_hash=nodes[0].parent_hash,
        token_ids=tuple(token for node in nodes for token in node.token_ids),
        medium=medium,
        adapter=nodes[0].namespace.adapter,
        extra_keys=tuple(node.extra_keys for node in nodes),
    )
