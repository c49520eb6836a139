"""The CPU tier: space for a fixed number of blocks, which are cached or belong to swapped-out sequences."""

from kvatlas_simulator.cache.eviction import BlockUse, EvictionKey, EvictionPolicy, EvictionQueue
from kvatlas_simulator.cache.prefix_tree import PrefixNode


class CpuTier:
    """Tracks which nodes have a copy on the CPU, and which copy is evicted first.

    A copy may be evicted if it is not being read and if nothing would become unreachable without it, either because the
    node has no children or because the GPU has a copy too.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self.num_blocks = num_blocks
        self.swap_blocks = 0
        """Reserved for swapped-out sequences."""
        self._policy = policy
        self._nodes: dict[int, PrefixNode] = {}
        self._candidates: EvictionQueue[int] = EvictionQueue()

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def room(self) -> int:
        """Number of blocks that fit without an eviction."""
        return self.num_blocks - self.swap_blocks - len(self._nodes)

    @property
    def candidates(self) -> EvictionQueue[int]:
        """The copies that may be evicted, by block hash."""
        return self._candidates

    def store(self, node: PrefixNode, tick: int) -> None:
        """Add a copy of the node; the tier must have room."""
        node.on_cpu = True
        node.cpu_cached_at = node.cpu_released_at = tick
        self._nodes[node.block_hash] = node
        self.update_candidate(node)

    def remove(self, node: PrefixNode) -> None:
        """Drop the node's copy."""
        node.on_cpu = False
        del self._nodes[node.block_hash]
        self._candidates.discard(node.block_hash)

    def touch(self, node: PrefixNode, tick: int) -> None:
        """Record that the node's copy was read."""
        node.cpu_released_at = tick
        self.update_candidate(node)

    def take_victim(self) -> PrefixNode | None:
        """The candidate to evict next; None if every copy must stay."""
        if not len(self._candidates):
            return None
        return self._nodes[self._candidates.pop()]

    def update_candidate(self, node: PrefixNode) -> None:
        """Call after any change that affects whether the node's copy is a candidate."""
        if node.on_cpu and not node.pinned and (node.gpu_block_ids or not node.children):
            self._candidates.put(node.block_hash, self.key(node))
        else:
            self._candidates.discard(node.block_hash)

    def key(self, node: PrefixNode) -> EvictionKey:
        """The position of the node's copy in the eviction order."""
        return self._policy.key(BlockUse(node.cpu_cached_at, node.cpu_released_at, node.hits, node.depth))

    def nodes(self) -> tuple[PrefixNode, ...]:
        return tuple(self._nodes.values())
