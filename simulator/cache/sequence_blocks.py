"""The blocks of live sequences: matching cached ones, new ones for more tokens, and copies of shared ones before a write.

Nothing here checks whether enough blocks are available: the caller first calls `required` or `growth`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from kvatlas_simulator.cache.allocation import Priority
from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.cache.block_pool import BlockPool
from kvatlas_simulator.cache.block_table import BlockTable, count_blocks
from kvatlas_simulator.cache.prefix_cache import PrefixCache
from kvatlas_simulator.cache.prefix_tree import PrefixNode


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt; valid until the cache changes."""

    prompt_tokens: int
    namespace: Namespace
    nodes: tuple[PrefixNode, ...]
    hit_tokens: int
    lookup_blocks: int
    """Number of full blocks of the prompt that a hit could have covered."""


@dataclass(slots=True)
class LiveSequence:
    """The state that a cache keeps for one sequence."""

    namespace: Namespace
    priority: Priority
    last_access: float
    table: BlockTable
    nodes: list[PrefixNode] = field(default_factory=list)
    """The nodes of its leading full blocks; fewer than the table's full blocks if prefixes are not (yet) cached, or after a
    hash collision."""
    swapped_tokens: list[int] | None = None
    """Its content while it is swapped out."""
    max_tokens: int | None = None


class SequenceBlocks:
    """Moves blocks between the pool, the prefix cache and block tables."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, block_size: int) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self.copies = 0
        """Blocks copied on write."""

    def match(
        self, token_ids: Sequence[int], namespace: Namespace, lookup_blocks: int, known: Iterable[PrefixNode] = ()
    ) -> PrefixMatch:
        """The longest cached prefix of at most `lookup_blocks` blocks; `known` are nodes that an earlier match found."""
        if not self._prefix_cache.settings.sharing:
            return PrefixMatch(len(token_ids), namespace, (), 0, 0)
        size = self._block_size
        # a pruned node has no copy, even if its block has been cached again since, because that made another node
        nodes = list(takewhile(self._prefix_cache.usable, known))
        parent = nodes[-1] if nodes else None
        for index in range(len(nodes), lookup_blocks):
            node = self._prefix_cache.find(parent, tuple(token_ids[index * size : (index + 1) * size]), namespace)
            if node is None:
                break
            nodes.append(node)
            parent = node
        if len(nodes) * size < self._prefix_cache.settings.min_tokens:
            nodes = []
        return PrefixMatch(len(token_ids), namespace, tuple(nodes), len(nodes) * size, lookup_blocks)

    def required(self, match: PrefixMatch, new_tokens: int) -> int:
        """Number of available blocks that `fill` takes to hold the match and this many tokens after it."""
        taken = sum(
            1 for node in match.nodes if not node.gpu_block_ids or not self._pool[node.gpu_block_ids[0]].references
        )
        return taken + count_blocks(new_tokens, self._block_size)

    def growth(self, sequence: LiveSequence, tokens: int) -> int:
        """Number of available blocks that `append` takes: those that it adds to the sequence, plus one if it copies a
        shared block."""
        return self._added(sequence, tokens) + self._copies_tail(sequence, tokens)

    def fill(self, sequence: LiveSequence, match: PrefixMatch, token_ids: Sequence[int]) -> None:
        """Give a sequence that has no blocks those of a match, and write the tokens that follow it."""
        sequence.table = BlockTable(self._block_size, self._prefix_cache.hold(match.nodes), match.hit_tokens)
        sequence.nodes = list(match.nodes)
        self.append(sequence, token_ids)

    def append(self, sequence: LiveSequence, token_ids: Sequence[int]) -> None:
        """Write tokens after a sequence's last one; full blocks are cached immediately."""
        size, table = self._block_size, sequence.table
        added = self._added(sequence, len(token_ids))
        if self._copies_tail(sequence, len(token_ids)):
            self._copy_tail(table)
        # All blocks are allocated before any is cached, so that removals come before stores, as in vLLM.
        table.block_ids += [self._prefix_cache.allocate().block_id for _ in range(added)]
        written, length = 0, table.length
        while written < len(token_ids):
            block = self._pool[table.block_ids[(length + written) // size]]
            piece = token_ids[written : written + size - len(block.token_ids)]
            block.token_ids.extend(piece)
            written += len(piece)
        table.length = length + written
        self._cache_full_blocks(sequence)

    def share(self, source: LiveSequence, blocks: int) -> tuple[BlockTable, list[PrefixNode]]:
        """A table of a sequence's first blocks, referenced once more, and the cached nodes among them."""
        table = source.table.head(blocks)
        for block_id in table.block_ids:
            self._pool.reference(self._pool[block_id])
        return table, source.nodes[:blocks]

    def release(self, sequence: LiveSequence) -> None:
        """Release a sequence's blocks, tail first."""
        for block_id in reversed(sequence.table.block_ids):
            self._prefix_cache.release(self._pool[block_id])
        sequence.table = BlockTable(self._block_size)
        sequence.nodes = []
        self._prefix_cache.limit_prefixes()

    def read(self, sequence: LiveSequence) -> list[int]:
        """A sequence's tokens, from its blocks or from its swapped-out copy."""
        if sequence.swapped_tokens is not None:
            return list(sequence.swapped_tokens)
        return [token for block_id in sequence.table.block_ids for token in self._pool[block_id].token_ids]

    def exclusive(self, sequence: LiveSequence) -> int:
        """Number of a sequence's blocks that no other sequence holds."""
        return sum(self._pool[block_id].references == 1 for block_id in sequence.table.block_ids)

    def fragmentation(self, sequences: Iterable[LiveSequence]) -> float:
        """Share of empty slots in the blocks that these sequences hold; pass all live sequences."""
        slots = self._pool.referenced_blocks * self._block_size
        if not slots:
            return 0.0
        tails = {sequence.table.block_ids[-1] for sequence in sequences if sequence.table.block_ids}
        return sum(self._block_size - len(self._pool[block_id].token_ids) for block_id in tails) / slots

    def _added(self, sequence: LiveSequence, tokens: int) -> int:
        table = sequence.table
        return table.blocks_needed(table.length + tokens) - len(table)

    def _copies_tail(self, sequence: LiveSequence, tokens: int) -> bool:
        """True if writing tokens would write to a partial block that another sequence also holds."""
        table = sequence.table
        return bool(tokens and table.free_tokens) and self._pool[table.block_ids[-1]].references > 1

    def _copy_tail(self, table: BlockTable) -> None:
        tail = self._pool[table.block_ids[-1]]
        copy = self._prefix_cache.allocate()
        copy.token_ids = list(tail.token_ids)
        self._pool.dereference(tail)
        table.block_ids[-1] = copy.block_id
        self.copies += 1

    def _cache_full_blocks(self, sequence: LiveSequence) -> None:
        """Cache the newly full blocks. After a hash collision the rest of the sequence stays uncached."""
        length = sequence.table.length
        if not self._prefix_cache.settings.sharing or length < self._prefix_cache.settings.min_tokens:
            return
        full_ids = sequence.table.block_ids[len(sequence.nodes) : length // self._block_size]
        parent = sequence.nodes[-1] if sequence.nodes else None
        full = [self._pool[block_id] for block_id in full_ids]
        sequence.nodes += self._prefix_cache.store(parent, full, sequence.namespace)
