"""The paged cache keeps its invariants after every step of random use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace, SeededBlockHasher
from kvatlas_simulator.cache.errors import InsufficientBlocks
from kvatlas_simulator.cache.eviction import BuiltInPolicy
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import Medium
from kvatlas_simulator.cache.sequence_blocks import PrefixMatch
from tests.simulator.cache.event_fold import EventFold

BLOCK_SIZE = 2
NAMESPACES = st.sampled_from([Namespace(), Namespace(adapter="a"), Namespace(cache_salt="a")])
TOKENS = st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=2 * n - 1, max_size=2 * n + 1))


class CollidingHasher:
    """A hasher with only eight different hashes; hits must still be correct."""

    def __init__(self) -> None:
        self._inner = SeededBlockHasher(5)

    def __call__(self, parent_hash: int | None, token_ids: Sequence[int], namespace: Namespace) -> int:
        return self._inner(parent_hash, token_ids, namespace) % 8


class CacheMachine(RuleBasedStateMachine):
    hasher: BlockHasher = SeededBlockHasher(5)
    sequence_ids: Bundle[str] = Bundle("sequence_ids")

    @initialize(
        num_blocks=st.integers(1, 6),
        num_cpu_blocks=st.sampled_from([0, 1, 2, 3, 4]),
        eviction=st.sampled_from(BuiltInPolicy),
    )
    def start(self, num_blocks: int, num_cpu_blocks: int, eviction: BuiltInPolicy) -> None:
        self.cache = KVCache(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            hasher=self.hasher,
            eviction=eviction,
            num_cpu_blocks=num_cpu_blocks,
        )
        self.fold = EventFold(BLOCK_SIZE)
        self.written: dict[str, list[int]] = {}
        self.swapped: set[str] = set()
        self.namespaces: dict[str, Namespace] = {}
        self.ever_cached: set[tuple[Namespace, tuple[int, ...]]] = set()
        self.gpu_was_reset_alone = False
        self.next_id = 0
        self.earlier: tuple[list[int], Namespace, PrefixMatch] | None = None

    def new_id(self) -> str:
        self.next_id += 1
        return f"s{self.next_id}"

    @rule(target=sequence_ids, prompt=TOKENS, namespace=NAMESPACES)
    def allocate(self, prompt: list[int], namespace: Namespace) -> str:
        sequence_id = self.new_id()
        match = self.cache.match(prompt, namespace)
        hit = prompt[: match.hit_tokens]
        assert match.hit_tokens <= len(prompt) - 1 and match.hit_tokens % BLOCK_SIZE == 0
        for end in range(BLOCK_SIZE, match.hit_tokens + 1, BLOCK_SIZE):
            assert (namespace, tuple(prompt[:end])) in self.ever_cached
        assert match.hit_tokens == self.expected_hit_tokens(prompt, namespace)
        rest = prompt[match.hit_tokens :]
        request = AllocationRequest(sequence_id, prompt, namespace, first_chunk=0)
        if self.cache.can_allocate(replace(request, first_chunk=None)):
            self.cache.allocate(request)
            assert self.cache.read(sequence_id) == hit
            self.cache.extend(sequence_id, rest)
            self.record(sequence_id, prompt, namespace)
        return sequence_id

    @rule(prompt=TOKENS, namespace=NAMESPACES)
    def keep_a_match(self, prompt: list[int], namespace: Namespace) -> None:
        self.earlier = (prompt, namespace, self.cache.match(prompt, namespace))

    @invariant()
    def an_earlier_match_only_saves_work(self) -> None:
        if self.earlier is not None:
            prompt, namespace, match = self.earlier
            assert self.cache.match(prompt, namespace, match) == self.cache.match(prompt, namespace)

    @rule(sequence_id=sequence_ids, tokens=TOKENS)
    def extend(self, sequence_id: str, tokens: list[int]) -> None:
        if sequence_id not in self.written or sequence_id in self.swapped:
            return
        before = self.written[sequence_id]
        added = -(-(len(before) + len(tokens)) // BLOCK_SIZE) - -(-len(before) // BLOCK_SIZE)
        fits = self.cache.can_extend(sequence_id, len(tokens))
        try:
            self.cache.extend(sequence_id, tokens)
        except InsufficientBlocks:
            assert not fits
            assert added + 1 > self.cache.available_blocks, "one more only if a shared partial block is copied"
        else:
            assert fits
            self.record(sequence_id, before + tokens, self.namespaces[sequence_id])

    @rule(sequence_id=sequence_ids)
    def swap(self, sequence_id: str) -> None:
        """Swap a sequence out, or back in."""
        if sequence_id not in self.written:
            return
        blocks = -(-len(self.written[sequence_id]) // BLOCK_SIZE)
        if sequence_id in self.swapped:
            try:
                self.cache.swap_in(sequence_id)
                self.swapped.discard(sequence_id)
            except InsufficientBlocks as error:
                needed, available = error.needed, error.available
                assert available < needed <= blocks and available == self.cache.available_blocks
        else:
            try:
                assert self.cache.swap_out(sequence_id) == blocks
                self.swapped.add(sequence_id)
            except InsufficientBlocks as error:
                needed, available = error.needed, error.available
                assert needed == blocks and available == self.cache.num_cpu_blocks - self.swap_blocks()

    @rule()
    def defragment(self) -> None:
        result = self.cache.defragment()
        free = sorted(self.cache._pool.free_ids)
        assert free == list(range(self.cache.num_blocks - len(free), self.cache.num_blocks))
        assert result.fragmentation_after == 0 <= result.fragmentation_before
        assert bool(result.moved_blocks) >= bool(result.fragmentation_before)

    @rule(keep_blocks=st.sampled_from([None, 0, 1, 2]))
    def gc(self, keep_blocks: int | None) -> None:
        pool = self.cache._pool
        free, spare = pool.free_blocks, pool.available_blocks - pool.free_blocks
        freed = self.cache.gc(keep_blocks=keep_blocks)
        assert freed.blocks == (0 if keep_blocks is None else max(0, spare - keep_blocks))
        assert pool.free_blocks == free + freed.blocks

    @rule(target=sequence_ids, source=sequence_ids, blocks=st.sampled_from([None, 0, 1, 2]))
    def fork(self, source: str, blocks: int | None) -> str:
        sequence_id = self.new_id()
        if source in self.written and source not in self.swapped:
            tokens = self.written[source]
            held = -(-len(tokens) // BLOCK_SIZE)
            shared = held if blocks is None else min(blocks, held)
            self.cache.fork(source, sequence_id, blocks=None if blocks is None else shared)
            self.record(sequence_id, tokens[: shared * BLOCK_SIZE], self.namespaces[source])
            assert self.cache.shared_blocks(source, sequence_id) == shared
        return sequence_id

    @rule(sequence_id=consumes(sequence_ids))
    def release(self, sequence_id: str) -> None:
        if self.written.pop(sequence_id, None) is not None:
            self.swapped.discard(sequence_id)
            self.cache.free(sequence_id)

    @rule(include_cpu=st.booleans())
    def reset(self, include_cpu: bool) -> None:
        done = self.cache.reset(include_cpu=include_cpu)
        assert done == (not any(tokens for name, tokens in self.written.items() if name not in self.swapped))
        self.gpu_was_reset_alone |= done and not include_cpu

    @precondition(lambda self: len(self.written) > 2)
    @rule()
    def release_all(self) -> None:
        for sequence_id in list(self.written):
            self.release(sequence_id)

    def record(self, sequence_id: str, tokens: list[int], namespace: Namespace) -> None:
        self.written[sequence_id] = tokens
        self.namespaces[sequence_id] = namespace
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            self.ever_cached.add((namespace, tuple(tokens[:end])))

    def swap_blocks(self) -> int:
        return sum(-(-len(self.written[name]) // BLOCK_SIZE) for name in self.swapped)

    def expected_hit_tokens(self, prompt: list[int], namespace: Namespace) -> int:
        """The expected hit, from what a subscriber knows, with the hash chain computed independently."""
        parent, hit = None, 0
        for start in range(0, len(prompt) - BLOCK_SIZE, BLOCK_SIZE):
            block = prompt[start : start + BLOCK_SIZE]
            parent = self.hasher(parent, block, namespace)
            if not self.fold.holds(parent):
                break
            hit = start + BLOCK_SIZE
        return hit

    @invariant()
    def references_equal_block_tables(self) -> None:
        tables = Counter(
            block_id for sequence in self.cache._sequences.values() for block_id in sequence.table.block_ids
        )
        pool = self.cache._pool
        for block in pool.blocks:
            assert block.references == tables[block.block_id]
        assert pool.referenced_blocks == len(tables)

    @invariant()
    def every_block_is_in_exactly_one_place(self) -> None:
        pool = self.cache._pool
        free = Counter(pool.free_ids)
        assert all(count == 1 for count in free.values())
        for block in pool.blocks:
            cached = block.node is not None and not block.references
            assert (block.block_id in free) + bool(block.references) + cached == 1
            if block.block_id in free:
                assert block.node is None and not block.token_ids
            if block.node is not None:
                assert block.block_id in block.node.gpu_block_ids
                assert tuple(block.token_ids) == block.node.token_ids

    @invariant()
    def sequences_read_what_was_written(self) -> None:
        for sequence_id, tokens in self.written.items():
            assert self.cache.read(sequence_id) == tokens

    @invariant()
    def the_events_fold_to_exactly_what_is_cached(self) -> None:
        self.fold.apply(self.cache.take_events())
        held: Counter[tuple[int, Medium]] = Counter()
        for node in self.cache.nodes:
            if node.gpu_block_ids:
                held[(node.block_hash, Medium.GPU)] = len(node.gpu_block_ids)
            if node.on_cpu:
                held[(node.block_hash, Medium.CPU)] = 1
        assert self.fold.copies == held
        stats = self.cache.stats()
        assert stats.cached_blocks == sum(count for (_, medium), count in held.items() if medium is Medium.GPU)
        assert stats.cpu_blocks == sum(count for (_, medium), count in held.items() if medium is Medium.CPU)
        assert stats.swap_blocks == self.swap_blocks()
        assert stats.cpu_blocks + stats.swap_blocks <= self.cache.num_cpu_blocks
        assert stats.allocations - stats.deallocations == self.cache.num_blocks - self.cache._pool.free_blocks
        assert stats.cached_prefixes == sum(1 for node in self.cache.nodes if not node.children)

    @invariant()
    def cached_blocks_are_reachable(self) -> None:
        for node in self.cache.nodes:
            assert node.resident or node.children, "a node that nothing needs"
            assert node.gpu_children == sum(1 for child in node.children.values() if child.gpu_block_ids)
            if node.parent is None:
                continue
            if node.gpu_block_ids:
                assert node.parent.gpu_block_ids
            if node.resident and not self.gpu_was_reset_alone:
                assert node.parent.resident

    @invariant()
    def candidates_are_the_unreferenced_leaves(self) -> None:
        blocks, nodes = self.cache._pool.blocks, self.cache.nodes
        queue = self.cache._prefix_cache._candidates
        cpu_queue = self.cache._prefix_cache._cpu_tier.candidates
        candidates = {block.block_id for block in blocks if block.block_id in queue}
        expected = {
            block.block_id
            for block in blocks
            if block.node is not None
            and not block.references
            and (len(block.node.gpu_block_ids) > 1 or not block.node.gpu_children)
        }
        assert candidates == expected and len(queue) == len(expected)
        on_cpu = {node.block_hash for node in nodes if node.on_cpu and node.block_hash in cpu_queue}
        assert on_cpu == {
            node.block_hash for node in nodes if node.on_cpu and (node.gpu_block_ids or not node.children)
        }

    @invariant()
    def fractions_are_fractions(self) -> None:
        stats = self.cache.stats()
        assert (
            0 <= stats.utilisation <= 1
            and 0 <= stats.fragmentation < 1
            and 0 <= stats.free_fragmentation < 1
            and 0 <= stats.hit_rate <= 1
        )


class CollidingCacheMachine(CacheMachine):
    hasher = CollidingHasher()

    def expected_hit_tokens(self, prompt: list[int], namespace: Namespace) -> int:
        return self.cache.match(prompt, namespace).hit_tokens  # a colliding hash does not show what is cached


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestCollidingCache = CollidingCacheMachine.TestCase
TestCollidingCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
