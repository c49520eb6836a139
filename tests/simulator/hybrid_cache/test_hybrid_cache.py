"""A hybrid engine's cache: its reuse follows from its own events by vLLM's rules, and nothing is lost or held twice."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.errors import InsufficientBlocks, SequenceExists, SequenceNotFound
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.hybrid_cache import CacheGroup, HybridCache, Retention
from kvatlas_simulator.zmq_events import EventEncoding
from tests.publishers.naive_reuse import Group, NaiveReuse
from tests.simulator.engine.engines import cached_tokens_of, run_to_end

BLOCK = 4
MODELS = {
    "swa": ("full", "swa:10"),
    "swa of one block": ("full", "swa:4"),
    "two swa": ("swa:6", "full", "swa:33"),
    "mamba": ("full", "mamba"),
    "chunked": ("full", "chunked:16"),
    "swa and mamba": ("full", "swa:10", "mamba"),
    "all": ("full", "swa:10", "mamba", "chunked:16"),
}


def make_cache(groups: Iterable[str], num_blocks: int = 120, interval: int = 0) -> HybridCache:
    parsed = [CacheGroup.parse(text) for text in groups]
    return HybridCache(parsed, num_blocks=num_blocks, block_size=BLOCK, retention=Retention(interval))


class Copies:
    """Derives from the events what a subscriber does: copies by (hash, group)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, int]] = Counter()

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.counts.update((name, event.group) for name in event.block_hashes)
                case BlockRemoved():
                    self.counts[event.block_hash, event.group] -= 1
                case GpuCleared():
                    self.counts.clear()


def copies_in(cache: HybridCache) -> Counter[tuple[int, int]]:
    return Counter(
        {
            (content.block_hash, group): len(ids)
            for content in cache.contents
            for group, ids in enumerate(content.copies)
            if ids
        }
    )


@pytest.mark.parametrize("interval", [0, BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("model", MODELS)
def test_a_hit_is_what_the_events_and_vllms_rules_say(model: str, interval: int) -> None:
    """With random prompts that grow, fork and repeat, while other sequences stay alive and the pool overflows."""
    chance = random.Random(f"{model} {interval}")
    cache = make_cache(MODELS[model], interval=interval)
    chunks = {i: group.tokens for i, group in enumerate(cache.groups) if group.kind.value.startswith("chunked")}
    naive = NaiveReuse(BLOCK, {i: Group(block_size=BLOCK, chunk=chunks.get(i)) for i in range(len(cache.groups))})
    encoding, folded = EventEncoding(BLOCK, groups=cache.groups), Copies()
    prompts: list[list[int]] = [[]]
    live: dict[str, list[int]] = {}
    hits = 0

    def fold() -> None:
        events = cache.take_events()
        folded.apply(events)
        naive.fold(encoding.encode_batch(0.0, events))

    for number in range(120):
        like = chance.choice(prompts[-10:])
        cut = len(like) if chance.random() < 0.5 else chance.randint(0, len(like))
        prompt = like[:cut] + [chance.randrange(50_000) for _ in range(chance.randint(1, 30))]
        if len(prompt) > 100:
            prompt = prompt[-20:]
        request = AllocationRequest(f"s{number}", prompt, first_chunk=chance.choice([None, 1, 7]))
        match = cache.match(prompt, request.namespace)
        if all(group.kind != "unknown" for group in naive.groups.values()):
            assert match.hit_tokens == naive.reusable(prompt)
        hits += match.hit_tokens > 0
        while not cache.can_allocate(request, match):
            assert live, "one request alone does not fit"
            oldest = next(iter(live))
            cache.free(oldest)
            del live[oldest]
            fold()
        cache.allocate(request, match)
        first = len(prompt) if request.first_chunk is None else match.hit_tokens + request.first_chunk
        live[f"s{number}"] = rest = prompt[first:] + [chance.randrange(50_000) for _ in range(chance.randint(0, 9))]
        fold()
        if chance.random() < 0.2 and not rest:
            cache.fork(f"s{number}", f"fork of s{number}")
            live[f"fork of s{number}"] = []
        for name in [name for name in live if chance.random() < 0.7]:
            step = [*live[name][:8], chance.randrange(50_000)] if name.startswith("fork") else live[name][:8]
            live[name] = live[name][8:]
            if step and cache.can_extend(name, len(step)):
                cache.extend(name, step)
                fold()
            else:
                cache.free(name)
                del live[name]
        prompts.append(prompt)
        assert +folded.counts == copies_in(cache)
    for name in live:
        cache.free(name)
    assert cache.available_blocks == cache.num_blocks
    assert hits > 30
    assert cache.reset() and not cache.contents


def test_a_sliding_window_keeps_only_what_a_prompts_end_needs() -> None:
    cache = make_cache(("full", "swa:8"))
    cache.allocate(AllocationRequest("a", list(range(42))))
    cache.free("a")
    stored = [event for event in cache.take_events() if isinstance(event, BlocksStored)]
    assert [(event.group, len(event.block_hashes)) for event in stored] == [(0, 10), (1, 2)]
    assert cache.match(list(range(42)), AllocationRequest("b", []).namespace).hit_tokens == 40
    fork = [*range(20), 7, 7, 7, 7]
    assert cache.match(fork, AllocationRequest("b", []).namespace).hit_tokens == 0


def test_where_a_prompt_left_another_is_kept_for_the_next_one() -> None:
    cache = make_cache(("full", "mamba"))
    shared = list(range(40))
    for name, hit in (("a", 0), ("b", 0), ("c", 40)):
        prompt = [*shared, *(ord(name) * 1000 + i for i in range(9))]
        request = AllocationRequest(name, prompt)
        assert cache.match(prompt, request.namespace).hit_tokens == hit
        cache.allocate(request)
        cache.free(name)


def test_an_engine_with_a_hybrid_cache_answers_as_any_other() -> None:
    engine = EngineCore(make_cache(("full", "swa:8", "mamba"), 200))
    prompt = tuple(range(50))
    engine.submit(GenerationRequest("a", prompt, 5, choices=3))
    first = run_to_end(engine)
    assert sum(len(result.tokens) for result in first) == 15 and cached_tokens_of(first, "a") == 0
    engine.submit(GenerationRequest("b", prompt, 1))
    assert cached_tokens_of(run_to_end(engine), "b") == 48
    assert engine.cache.available_blocks == engine.cache.num_blocks


def test_a_refused_call_changes_nothing() -> None:
    cache = make_cache(("full", "swa:8"), num_blocks=10)
    cache.allocate(AllocationRequest("a", list(range(16))))
    before = copies_in(cache), cache.available_blocks
    with pytest.raises(InsufficientBlocks):
        cache.allocate(AllocationRequest("b", list(range(100, 116))))
    with pytest.raises(InsufficientBlocks):
        cache.extend("a", list(range(16)))
    with pytest.raises(SequenceExists):
        cache.allocate(AllocationRequest("a", [1]))
    with pytest.raises(SequenceNotFound):
        cache.free("b")
    assert not cache.reset() and (copies_in(cache), cache.available_blocks) == before


@pytest.mark.parametrize("text", ["", "swa", "swa:0", "swa:x", "full:3", "mamba:1", "linear", "chunked:-1"])
def test_a_group_that_no_engine_has_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="expected full, swa:WINDOW, chunked:SIZE or mamba"):
        CacheGroup.parse(text)


def test_groups_and_sizes_that_do_not_fit_each_other_are_refused() -> None:
    for groups, interval in (
        (("swa:8",), 0),
        (("full", "full"), 0),
        (("full", "chunked:10"), 0),
        (("full", "mamba"), 6),
    ):
        with pytest.raises(InvalidValue):
            make_cache(groups, interval=interval)
