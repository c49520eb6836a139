"""The prefix cache: full blocks that are found by content, on the GPU and in an optional CPU tier.

A cached block stays until its room is needed, whether a sequence holds it or not. Blocks leave the GPU from a sequence's
tail; with a CPU tier they are swapped out to it, and back in at the next hit.
"""

from collections.abc import Sequence

from simulator.cache.block_hash import BlockHasher, Namespace
from simulator.cache.block_pool import Block, BlockPool
from simulator.cache.cpu_tier import CpuTier
from simulator.cache.eviction import EvictionPolicy, EvictionQueue
from simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent, Medium
from simulator.cache.prefix_tree import PrefixNode, PrefixTree


class PrefixCache:
    """Allocates the pool's blocks and caches, evicts and swaps the full ones. Records every change as a KV event.

    Its counters count since the start, in blocks; `cached_blocks` and `cpu_blocks` are of now.
    """

    def __init__(
        self, pool: BlockPool, cpu_tier: CpuTier, *, hasher: BlockHasher, policy: EvictionPolicy, report_hits: bool
    ) -> None:
        """`report_hits`: record a stored event for each hit on the GPU, as vLLM with `kv_cache_report_mode="full"`."""
        self._pool = pool
        self._cpu_tier = cpu_tier
        self._policy = policy
        self._report_hits = report_hits
        self._tree = PrefixTree(hasher)
        self._candidates: EvictionQueue[int] = EvictionQueue()
        self._events: list[KVEvent] = []
        self._tick = 0
        self.cached_blocks = 0
        self.allocations = 0
        self.evictions = 0
        self.swapped_out = 0
        self.swapped_in = 0
        self.cpu_evictions = 0

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Every block that is known by content; some have no copy."""
        return tuple(self._tree)

    @property
    def cpu_blocks(self) -> int:
        return len(self._cpu_tier)

    def find(self, parent: PrefixNode | None, token_ids: tuple[int, ...], namespace: Namespace) -> PrefixNode | None:
        """The node of this block behind `parent`, if it has a copy."""
        node = self._tree.find(parent, token_ids, namespace)
        return node if node is not None and node.resident else None

    def allocate(self) -> Block:
        """An empty block with one reference; evicts one if none is free. The caller knows that one is available."""
        if not self._pool.has_free:
            self._evict()
        block = self._pool.take_free()
        self._pool.reference(block)
        self.allocations += 1
        return block

    def hold(self, prefix: Sequence[PrefixNode]) -> list[int]:
        """Reference the blocks of a resident prefix; their ids. Blocks on the CPU alone are swapped in, for which the caller
        knows that there is room."""
        block_ids: list[int] = []
        for node in prefix:
            node.hits += 1
            if node.gpu_block_ids:
                block = self._pool[node.gpu_block_ids[0]]
                self._pool.reference(block)
                self._update_candidates(node)
                block_ids.append(block.block_id)
        if self._report_hits and block_ids:
            self._events.append(_stored(prefix[: len(block_ids)], Medium.GPU))
        return block_ids + self._swap_in(prefix[len(block_ids) :])

    def store(self, parent: PrefixNode | None, blocks: Sequence[Block], namespace: Namespace) -> list[PrefixNode]:
        """Cache full blocks that follow `parent`, head first; their nodes, fewer than blocks after a hash collision."""
        stored: list[PrefixNode] = []
        for block in blocks:
            node = self._tree.find_or_add(parent, tuple(block.token_ids), namespace)
            if node is None:
                break
            self._add_copy(block, node)
            stored.append(node)
            parent = node
        if stored:
            self._events.append(_stored(stored, Medium.GPU))
        return stored

    def release(self, block: Block) -> None:
        """Drop one sequence's reference. After the last one a cached block may be evicted; any other is free."""
        if not self._pool.dereference(block):
            return
        if block.node is None:
            self._pool.give_back(block)
        else:
            self._tick += 1
            block.released_at = self._tick
            self._update_candidates(block.node)

    def clear(self, *, include_cpu: bool) -> None:
        """Drop every cached block of the GPU, and of the CPU if asked. No sequence may hold a block."""
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
        node.gpu_block_ids.remove(block.block_id)
        self._candidates.discard(block.block_id)  # making room on the CPU may have made this block a candidate again
        block.node = None
        self.cached_blocks -= 1
        self.evictions += 1
        self._events.append(BlockRemoved(node.block_hash, Medium.GPU))
        self._pool.give_back(block)
        if not node.gpu_block_ids and node.parent is not None:
            node.parent.gpu_children -= 1
        if not node.resident:
            # Only if every CPU copy was being read: the CPU copies behind this block are unreachable now.
            for descendant in node.descendants():
                if descendant.on_cpu:
                    self._drop_cpu_copy(descendant)
                    self.cpu_evictions += 1
                self._tree.prune(descendant)
        self._prune(node)

    def _swap_out(self, node: PrefixNode) -> None:
        """Copy a node that leaves the GPU to the CPU, if the tier has room or can make it."""
        if not self._cpu_tier.num_blocks:
            return
        if self._cpu_tier.full:
            victim = self._cpu_tier.take_victim()
            if victim is None:
                return
            self._drop_cpu_copy(victim)
            self.cpu_evictions += 1
            self._prune(victim)
        self._tick += 1
        self._cpu_tier.store(node, self._tick)
        self.swapped_out += 1
        self._events.append(_stored([node], Medium.CPU))

    def _swap_in(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Give nodes that are only on the CPU a block on the GPU, held by the caller; the CPU copies stay."""
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
        """Decide again which copies of a node may be evicted, in both tiers; call after any change to it."""
        spare = len(node.gpu_block_ids) > 1 or not node.gpu_children
        for block_id in node.gpu_block_ids:
            block = self._pool[block_id]
            if spare and not block.references:
                key = self._policy.key(cached_at=block.cached_at, released_at=block.released_at, hits=node.hits)
                self._candidates.put(block_id, key)
            else:
                self._candidates.discard(block_id)
        self._cpu_tier.update_candidate(node)

    def _prune(self, node: PrefixNode) -> None:
        """Call after a node lost a copy: drops it from the tree if that was the last, and updates the nodes above."""
        if node.resident or node.children:
            self._update_candidates(node)
        if node.parent is not None:
            self._update_candidates(node.parent)
        remaining = self._tree.prune(node)
        if remaining is not None and remaining is not node:
            self._update_candidates(remaining)

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
