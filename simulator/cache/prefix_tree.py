"""Cached content: a tree of full blocks, found by the engine's chained hash.

A node is one block after all blocks before it. It knows its copies on the GPU (more than one if two sequences computed it
at the same time, as in vLLM) and on the CPU. A hash alone never makes a hit: parent, tokens and namespace are compared too,
so a hash collision only costs a hit.
"""

from collections.abc import Collection, Iterator, Sequence

from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace


class PrefixNode:
    """A block of tokens after one prefix. Compared by identity."""

    __slots__ = (
        "block_hash",
        "children",
        "cpu_cached_at",
        "cpu_released_at",
        "depth",
        "gpu_block_ids",
        "gpu_children",
        "hits",
        "namespace",
        "on_cpu",
        "parent",
        "pinned",
        "token_ids",
        "used_at",
    )

    def __init__(
        self,
        block_hash: int,
        parent: "PrefixNode | None",
        token_ids: tuple[int, ...],
        namespace: Namespace,
    ) -> None:
        self.block_hash = block_hash
        self.parent = parent
        self.token_ids = token_ids
        self.namespace = namespace
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[int, PrefixNode] = {}
        self.gpu_block_ids: list[int] = []
        """The ids of its GPU copies, oldest first."""
        self.gpu_children = 0
        """How many of its children have a copy on the GPU."""
        self.on_cpu = False
        self.cpu_cached_at = 0
        self.cpu_released_at = 0
        self.hits = 0
        self.used_at = 0.0
        """When a sequence last stored, hit or released it, in seconds; kept only if prefixes have a time to live."""
        self.pinned = False
        """True while the CPU copy is being read and must stay."""

    @property
    def resident(self) -> bool:
        return self.on_cpu or bool(self.gpu_block_ids)

    @property
    def parent_hash(self) -> int | None:
        return None if self.parent is None else self.parent.block_hash

    @property
    def extra_keys(self) -> tuple[str, ...]:
        return self.namespace.extra_keys(first=self.parent is None)

    def descendants(self) -> list["PrefixNode"]:
        """All nodes below this one, each after its own descendants."""
        found = [self]
        for node in found:  # the list grows during the loop
            found.extend(node.children.values())
        return found[:0:-1]


class PrefixTree:
    """All nodes that are resident or have a resident descendant."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._nodes: dict[int, PrefixNode] = {}
        self._leaves: dict[int, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[PrefixNode]:
        return iter(tuple(self._nodes.values()))

    @property
    def leaves(self) -> Collection[PrefixNode]:
        """The nodes without children: there is one for each distinct prefix. All of them are resident."""
        return self._leaves.values()

    def find(self, parent: PrefixNode | None, token_ids: tuple[int, ...], namespace: Namespace) -> PrefixNode | None:
        """The node for this block after `parent`, if it is known; it may have no copies left."""
        return self._lookup(self._hash(parent, token_ids, namespace), parent, token_ids, namespace)

    def find_or_add(
        self, parent: PrefixNode | None, token_ids: tuple[int, ...], namespace: Namespace
    ) -> PrefixNode | None:
        """The node for this block after `parent`, added if necessary; None if another block already has that hash."""
        block_hash = self._hash(parent, token_ids, namespace)
        if block_hash in self._nodes:
            return self._lookup(block_hash, parent, token_ids, namespace)
        node = PrefixNode(block_hash, parent, token_ids, namespace)
        self._nodes[block_hash] = self._leaves[block_hash] = node
        if parent is not None:
            parent.children[block_hash] = node
            self._leaves.pop(parent.block_hash, None)
        return node

    def prune(self, node: PrefixNode | None) -> PrefixNode | None:
        """Drop a node that is no longer needed, then its ancestors. Returns the first one that stays, if any."""
        while node is not None and not node.resident and not node.children:
            parent = node.parent
            if self._nodes.get(node.block_hash) is node:  # otherwise it has been dropped before
                del self._nodes[node.block_hash], self._leaves[node.block_hash]
                if parent is not None:
                    del parent.children[node.block_hash]
                    if not parent.children:
                        self._leaves[parent.block_hash] = parent
            node = parent
        return node

    def _hash(self, parent: PrefixNode | None, token_ids: Sequence[int], namespace: Namespace) -> int:
        return self._hasher(None if parent is None else parent.block_hash, token_ids, namespace)

    def _lookup(
        self, block_hash: int, parent: PrefixNode | None, token_ids: tuple[int, ...], namespace: Namespace
    ) -> PrefixNode | None:
        node = self._nodes.get(block_hash)
        if node is None or node.parent is not parent or node.token_ids != token_ids or node.namespace != namespace:
            return None
        return node
