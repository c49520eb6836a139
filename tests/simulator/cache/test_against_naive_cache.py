"""The cache does what a naive one does, block by block and count by count, under every setting and policy."""

from collections import Counter
from itertools import takewhile

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvatlas_simulator.cache import (
    AllocationRequest,
    BlockUse,
    BuiltInPolicy,
    EvictionPolicy,
    InsufficientBlocks,
    KVCache,
    KVGeometry,
    MemoryPressure,
    Namespace,
    PrefixSettings,
    PressureThresholds,
)
from kvatlas_simulator.cache.prefix_tree import PrefixNode
from tests.simulator.cache.naive_cache import NaiveCache, Prefix

SIZE = 2
GEOMETRY = KVGeometry(layers=3, heads=2, head_size=4)
NAMESPACES = st.sampled_from([Namespace(), Namespace(adapter="a")])
TOKENS = st.integers(1, 9).flatmap(lambda length: st.sampled_from([[0] * length, [0, 0, 0, 1, 1, 1, 0, 0, 1][:length]]))
"""Few different texts of any length, so that most prompts share a start with others."""
MORE = st.sampled_from([[0], [0, 0], [1], [0, 1, 0], [1, 1, 1, 1]])
PICK = st.integers(0, 5)
"""One of the live sequences."""


class DeepestFirst:
    """A user-defined policy."""

    def key(self, use: BlockUse) -> tuple[float, ...]:
        return (-use.depth, use.released_at)


class NaiveCacheMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([1, 5, 8, 11, 15, 20]),
        policy=st.sampled_from([*BuiltInPolicy, DeepestFirst()]),
        sharing=st.sampled_from([True, True, True, False]),
        min_tokens=st.sampled_from([0, 0, 3, 4]),
        max_prefixes=st.sampled_from([None, 1, 2, 3]),
        ttl_s=st.sampled_from([None, 2.0]),
    )
    def start(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        sharing: bool,
        min_tokens: int,
        max_prefixes: int | None,
        ttl_s: float | None,
    ) -> None:
        self.now = 0.0
        self.levels = [MemoryPressure.LOW]
        self.seen_levels = [MemoryPressure.LOW]
        self.next_name = 0
        chosen = PrefixSettings(sharing=sharing, min_tokens=min_tokens, max_prefixes=max_prefixes, ttl_s=ttl_s)
        self.naive = NaiveCache(num_blocks, SIZE, policy, chosen, lambda: self.now)
        self.cache = KVCache(
            num_blocks=num_blocks,
            block_size=SIZE,
            eviction=policy,
            geometry=GEOMETRY,
            prefixes=chosen,
            thresholds=PressureThresholds(0.3, 0.5, 0.9),
            on_pressure=self.see_level,
            clock=lambda: self.now,
        )

    def see_level(self, before: MemoryPressure, now: MemoryPressure) -> None:
        assert before is self.seen_levels[-1]
        self.seen_levels.append(now)

    def new_name(self) -> str:
        self.next_name += 1
        return f"s{self.next_name}"

    def pick(self, number: int) -> str:
        live = list(self.naive.sequences)
        return live[number % len(live)]

    @rule(prompt=TOKENS, namespace=NAMESPACES, first_chunk=st.sampled_from([None, None, 0, 3]))
    def allocate(self, prompt: list[int], namespace: Namespace, first_chunk: int | None) -> None:
        name = self.new_name()
        request = AllocationRequest(name, prompt, namespace, first_chunk=first_chunk)
        assert self.cache.match(prompt, namespace).hit_tokens == len(self.naive.match(prompt, namespace)) * SIZE
        can = self.cache.can_allocate(request)
        done = self.naive.allocate(name, prompt, namespace, len(prompt) if first_chunk is None else first_chunk)
        assert done == can
        try:
            self.cache.allocate(request)
        except InsufficientBlocks:
            assert not done
        else:
            assert done

    @precondition(lambda self: self.naive.sequences)
    @rule(number=PICK, tokens=MORE)
    def extend(self, number: int, tokens: list[int]) -> None:
        self.write(self.pick(number), tokens)

    def write(self, name: str, tokens: list[int]) -> None:
        can = self.cache.can_extend(name, len(tokens))
        done = self.naive.extend(name, tokens)
        assert done == can
        try:
            self.cache.extend(name, tokens)
        except InsufficientBlocks:
            assert not done
        else:
            assert done

    @precondition(lambda self: self.naive.sequences)
    @rule(number=PICK, blocks=st.sampled_from([9, 9, 2, 1, 0]), tokens=MORE, others=MORE)
    def fork(self, number: int, blocks: int, tokens: list[int], others: list[int]) -> None:
        """Fork a sequence, and write to both."""
        name, new = self.pick(number), self.new_name()
        blocks = min(blocks, len(self.naive.sequences[name].copies))
        self.naive.fork(name, new, blocks)
        self.cache.fork(name, new, blocks=blocks)
        self.sequences_are_equal()
        for each, more in ((name, tokens), (new, others)):
            self.write(each, more)
            self.every_change_of_pressure_is_reported()

    @precondition(lambda self: self.naive.sequences)
    @rule(number=PICK)
    def free(self, number: int) -> None:
        name = self.pick(number)
        self.naive.free(name)
        self.cache.free(name)

    @rule(prompt=TOKENS, namespace=NAMESPACES)
    def serve(self, prompt: list[int], namespace: Namespace) -> None:
        """Serve a request that is over at once."""
        self.allocate(prompt, namespace, None)
        self.every_change_of_pressure_is_reported()
        if f"s{self.next_name}" in self.naive.sequences:
            self.free(len(self.naive.sequences) - 1)

    @rule(keep=st.sampled_from([None, None, None, 0, 2]))
    def gc(self, keep: int | None) -> None:
        prefixes = len(self.naive.leaves())
        blocks = self.naive.gc(keep)
        freed = self.cache.gc(keep_blocks=keep)
        assert (freed.blocks, freed.prefixes) == (blocks, prefixes - len(self.naive.leaves()))
        assert freed.memory_bytes == blocks * 2 * 3 * 2 * 4 * SIZE * 2

        self.cache.defragment()

    @rule(seconds=st.sampled_from([1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def sequences_are_equal(self) -> None:
        assert set(self.cache.sequence_ids) == set(self.naive.sequences)
        for name, held in self.naive.sequences.items():
            assert self.cache.read(name) == held.tokens
            stats = self.cache.handle(name).stats()
            assert (stats.blocks, stats.tokens) == (len(held.copies), len(held.tokens))
            for other, others in self.naive.sequences.items():
                pairs = zip(held.copies, others.copies, strict=False)
                shared = len(list(takewhile(lambda pair: pair[0] is pair[1], pairs)))
                assert self.cache.shared_blocks(name, other) == shared

    @invariant()
    def cached_prefixes_are_equal(self) -> None:
        cached = Counter({prefix_of(node): len(node.gpu_block_ids) for node in self.cache.nodes})
        assert cached == Counter(copy.prefix for copy in self.naive.copies if copy.prefix is not None)

    @invariant()
    def statistics_are_equal(self) -> None:
        stats, naive = self.cache.stats(), self.naive
        assert {name: getattr(stats, name) for name in naive.counts} == naive.counts
        assert stats.cached_prefixes == len(naive.leaves())
        assert stats.utilisation == naive.held_blocks / naive.num_blocks
        assert stats.memory_bytes == GEOMETRY.bytes_of(naive.held_blocks * SIZE)
        held = [copy for copy in naive.copies if copy.holders]
        empty = sum(SIZE - len(copy.tokens) for copy in held)
        assert stats.fragmentation == (empty / (len(held) * SIZE) if held else 0)

    @invariant()
    def every_change_of_pressure_is_reported(self) -> None:
        used = self.naive.held_blocks / self.naive.num_blocks
        level = MemoryPressure(sum(used >= threshold for threshold in (0.3, 0.5, 0.9)))
        if level is not self.levels[-1]:
            self.levels.append(level)
        assert self.seen_levels == self.levels and self.cache.pressure is level


def prefix_of(node: PrefixNode) -> Prefix:
    tokens: tuple[int, ...] = ()
    at: PrefixNode | None = node
    while at is not None:
        tokens = at.token_ids + tokens
        at = at.parent
    return node.namespace, tokens


TestNaiveCache = NaiveCacheMachine.TestCase
TestNaiveCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
