"""One cache in specific situations: sharing, copy-on-write, eviction, swapping, reset, pressure."""

from dataclasses import replace

import pytest

from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import Namespace, SeededBlockHasher
from kvatlas_simulator.cache.errors import InsufficientBlocks
from kvatlas_simulator.cache.eviction import BuiltInPolicy
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, GpuCleared, KVEvent, Medium
from kvatlas_simulator.cache.pressure import MemoryPressure

PLAIN = Namespace()


def make_cache(
    num_blocks: int = 8,
    *,
    eviction: BuiltInPolicy = BuiltInPolicy.LRU,
    num_cpu_blocks: int = 0,
    seed: int = 1,
    report_hits: bool = False,
) -> KVCache:
    """A cache with blocks of 4 tokens."""
    return KVCache(
        num_blocks=num_blocks,
        block_size=4,
        hasher=SeededBlockHasher(seed),
        eviction=eviction,
        num_cpu_blocks=num_cpu_blocks,
        report_hits=report_hits,
    )


def run(cache: KVCache, sequence_id: str, tokens: list[int], namespace: Namespace = PLAIN) -> int:
    """Allocate a whole prompt. Returns how many of its tokens were hits."""
    request = AllocationRequest(sequence_id, tokens, namespace)
    match = cache.match(tokens, namespace)
    cache.allocate(request, match)
    return match.hit_tokens


def run_and_release(cache: KVCache, tokens: list[int], namespace: Namespace = PLAIN) -> int:
    hit_tokens = run(cache, "once", tokens, namespace)
    cache.free("once")
    return hit_tokens


def prompt(start: int, blocks: int) -> list[int]:
    """Tokens of this many full blocks, plus one."""
    return list(range(start, start + 4 * blocks + 1))


def removed(events: tuple[KVEvent, ...], medium: Medium = Medium.GPU) -> list[int]:
    return [event.block_hash for event in events if isinstance(event, BlockRemoved) and event.medium is medium]


def stored(events: tuple[KVEvent, ...], medium: Medium = Medium.GPU) -> list[int]:
    runs = [event for event in events if isinstance(event, BlocksStored) and event.medium is medium]
    return [block_hash for event in runs for block_hash in event.block_hashes]


def hashes_of(cache: KVCache, tokens: list[int]) -> list[int]:
    """Cache a prompt. Returns the hashes of its blocks, head first."""
    cache.take_events()
    run_and_release(cache, tokens)
    return stored(cache.take_events())


def test_a_prompt_hits_only_the_blocks_of_an_equal_prefix() -> None:
    cache = make_cache()
    run_and_release(cache, prompt(0, 3))
    assert cache.match([*prompt(0, 2), 99, 99, 99, 99], PLAIN).hit_tokens == 8
    assert cache.match([99, *prompt(0, 2)], PLAIN).hit_tokens == 0
    assert cache.match(prompt(4, 2), PLAIN).hit_tokens == 0, "equal blocks behind another prefix"


def test_hit_blocks_are_reported_as_stored_again_if_hits_are_reported() -> None:
    for report_hits in (False, True):
        cache = make_cache(report_hits=report_hits)
        first = hashes_of(cache, prompt(0, 3))
        again = hashes_of(cache, prompt(0, 3))
        assert again[: len(first)] == (first if report_hits else [])


def test_the_last_token_of_a_fully_cached_prompt_is_computed() -> None:
    cache = make_cache()
    tokens = prompt(0, 2)[:8]
    run_and_release(cache, tokens)
    assert cache.match(tokens, PLAIN).hit_tokens == 4
    assert cache.match([*tokens, 7], PLAIN).hit_tokens == 8


def test_adapters_and_salts_share_nothing() -> None:
    cache = make_cache(16)
    scopes = [PLAIN, Namespace(adapter="a"), Namespace(adapter="b"), Namespace(cache_salt="a")]
    assert [run_and_release(cache, prompt(0, 2), scope) for scope in scopes] == [0, 0, 0, 0]
    assert [run_and_release(cache, prompt(0, 2), scope) for scope in scopes] == [8, 8, 8, 8]


def test_extra_keys_name_the_adapter_in_every_block_and_the_salt_in_the_first() -> None:
    cache = make_cache()
    run(cache, "s", prompt(0, 2), Namespace(adapter="lora", cache_salt="tenant-1"))
    (event,) = cache.take_events()
    assert isinstance(event, BlocksStored)
    assert event.extra_keys == (("lora", "tenant-1"), ("lora",)) and event.adapter == "lora"


@pytest.mark.parametrize(
    "namespace", [PLAIN, Namespace("a"), Namespace(None, "t"), Namespace("a", "t"), Namespace("same", "same")]
)
def test_the_event_of_a_prompts_start_has_its_salt(namespace: Namespace) -> None:
    cache = make_cache()
    run(cache, "s", prompt(0, 2), namespace)
    cache.extend("s", [1, 2, 3])
    first, later = (event for event in cache.take_events() if isinstance(event, BlocksStored))
    assert (first.adapter, first.salt) == (namespace.adapter, namespace.cache_salt)
    assert later.salt is None


def test_hashes_depend_on_the_engines_seed() -> None:
    first, second = (hashes_of(make_cache(seed=seed), prompt(0, 3)) for seed in (1, 2))
    assert len(first) == len(second) == 3 and not set(first) & set(second)
    assert hashes_of(make_cache(seed=1), prompt(0, 3)) == first


def test_two_sequences_that_compute_one_prefix_at_the_same_time_keep_a_copy_each() -> None:
    cache = make_cache()
    tokens = prompt(0, 1)[:4]
    run(cache, "a", tokens)
    run(cache, "b", tokens)
    assert len(set(stored(cache.take_events()))) == 1 and cache.stats().cached_blocks == 2


def test_writing_to_a_shared_partial_block_copies_it() -> None:
    cache = make_cache()
    run(cache, "a", [1, 2, 3, 4, 5, 6])
    cache.fork("a", "b")
    assert cache.stats().allocations == 2 and cache.available_blocks == 6
    cache.extend("b", [70])
    assert cache.stats().copies == 1 and cache.available_blocks == 5
    cache.extend("a", [80])
    assert cache.stats().copies == 1, "no other sequence holds its block any more"
    assert cache.read("a") == [1, 2, 3, 4, 5, 6, 80]
    assert cache.read("b") == [1, 2, 3, 4, 5, 6, 70]


def test_full_shared_blocks_are_never_copied() -> None:
    cache = make_cache()
    run(cache, "a", [1, 2, 3, 4])
    cache.fork("a", "b")
    cache.extend("a", [5])
    cache.extend("b", [6])
    assert cache.stats().copies == 0 and cache.stats().allocations == 3


def test_a_write_that_lacks_a_block_for_the_copy_changes_nothing() -> None:
    cache = make_cache(1)
    run(cache, "a", [1, 2])
    cache.fork("a", "b")
    assert not cache.can_extend("b", 1)
    with pytest.raises(InsufficientBlocks, match="insufficient blocks: need 1, have 0"):
        cache.extend("b", [3])
    assert cache.read("a") == cache.read("b") == [1, 2]


def test_a_sequence_is_evicted_from_its_tail() -> None:
    for policy in BuiltInPolicy:
        cache = make_cache(4, eviction=policy)
        head, middle, tail = hashes_of(cache, prompt(0, 3))
        run_and_release(cache, prompt(100, 2))
        assert removed(cache.take_events()) == [tail, middle], policy
        assert head not in removed(cache.take_events())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (BuiltInPolicy.LRU, ["second", "third", "first"]),
        (BuiltInPolicy.FIFO, ["first", "second", "third"]),
        (BuiltInPolicy.FREQUENCY, ["second", "third", "first"]),
    ],
)
def test_each_policy_evicts_in_its_own_order_after_a_hit_on_the_first(
    policy: BuiltInPolicy, expected: list[str]
) -> None:
    cache = make_cache(4, eviction=policy)
    names = {
        hashes_of(cache, prompt(start, 1))[0]: name for start, name in ((0, "first"), (10, "second"), (20, "third"))
    }
    assert run_and_release(cache, prompt(0, 1)) == 4
    cache.take_events()
    run(cache, "all", prompt(100, 3))
    assert [names[block_hash] for block_hash in removed(cache.take_events())] == expected


def test_frequency_keeps_the_block_that_was_hit_more_often_though_longer_ago() -> None:
    caches = {policy: make_cache(3, eviction=policy) for policy in (BuiltInPolicy.FREQUENCY, BuiltInPolicy.LRU)}
    survivors = {}
    for policy, cache in caches.items():
        run_and_release(cache, prompt(0, 1))
        run_and_release(cache, prompt(10, 1))
        for start in (0, 0, 10):
            run_and_release(cache, prompt(start, 1))
        run(cache, "pressing", prompt(100, 1))
        survivors[policy] = [start for start in (0, 10) if cache.match(prompt(start, 1), PLAIN).hit_tokens]
    assert survivors == {BuiltInPolicy.FREQUENCY: [0], BuiltInPolicy.LRU: [10]}


def test_blocks_that_a_sequence_holds_are_never_evicted() -> None:
    cache = make_cache(4)
    run(cache, "held", prompt(0, 2))
    more = AllocationRequest("more", prompt(50, 2), first_chunk=0)
    assert cache.can_allocate(more) and not cache.can_allocate(replace(more, first_chunk=None))
    cache.allocate(more)
    with pytest.raises(InsufficientBlocks, match="insufficient blocks: need 3, have 1"):
        cache.extend("more", prompt(50, 2))
    cache.extend("more", [50, 51, 52, 53])
    assert cache.read("held") == prompt(0, 2)


def test_evicted_blocks_are_swapped_out_and_back_in() -> None:
    cache = make_cache(4, num_cpu_blocks=8)
    hashes = hashes_of(cache, prompt(0, 3))
    run_and_release(cache, prompt(100, 3))
    events = cache.take_events()
    assert stored(events, Medium.CPU) == removed(events) == hashes[::-1], (
        "tail first, and stored on the CPU before removed from the GPU"
    )
    match = cache.match(prompt(0, 3), PLAIN)
    assert match.hit_tokens == 12 and cache.swap_ins(match) == 3
    run(cache, "back", prompt(0, 3))
    assert stored(cache.take_events()) == hashes, "one run, head first"
    assert cache.read("back") == prompt(0, 3)
    stats = cache.stats()
    assert (stats.swapped_in, stats.cpu_blocks) == (3, 6), "the CPU copies stay"


def test_a_full_cpu_tier_evicts_from_the_tail_too() -> None:
    cache = make_cache(3, num_cpu_blocks=2)
    head, second = hashes_of(cache, prompt(0, 2))
    run_and_release(cache, prompt(100, 2))
    assert cache.stats().cpu_blocks == 2
    cache.take_events()
    run_and_release(cache, prompt(200, 2))
    gone = removed(cache.take_events(), Medium.CPU)
    assert gone == [second, head]
    assert cache.stats().cpu_evictions == 2


def test_a_reset_clears_the_gpu_and_leaves_the_cpu_unless_asked() -> None:
    cache = make_cache(3, num_cpu_blocks=4)
    run_and_release(cache, prompt(0, 2))
    run_and_release(cache, prompt(100, 2))
    cache.take_events()
    assert cache.reset()
    assert cache.take_events() == (GpuCleared(),)
    assert cache.match(prompt(0, 2), PLAIN).hit_tokens == 8 and cache.match(prompt(100, 2), PLAIN).hit_tokens == 0
    assert cache.reset(include_cpu=True)
    cleared, *rest = cache.take_events()
    assert cleared == GpuCleared() and len(removed(tuple(rest), Medium.CPU)) == 2
    assert cache.match(prompt(0, 2), PLAIN).hit_tokens == 0


def test_a_reset_is_refused_while_blocks_are_held() -> None:
    cache = make_cache()
    run(cache, "s", prompt(0, 2))
    cache.take_events()
    assert not cache.reset() and not cache.take_events()


def test_opening_a_prefix_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    cache = make_cache(3, num_cpu_blocks=4)
    run_and_release(cache, prompt(0, 2))
    run(cache, "held", prompt(100, 2))
    match = cache.match(prompt(0, 2), PLAIN)
    assert match.hit_tokens == 8
    with pytest.raises(InsufficientBlocks, match="insufficient blocks: need 2, have 0"):
        cache.allocate(AllocationRequest("s", prompt(0, 2), first_chunk=0), match)
    assert cache.match(prompt(0, 2), PLAIN).nodes == match.nodes


@pytest.mark.parametrize(
    ("held_blocks", "level"),
    [
        (0, MemoryPressure.LOW),
        (11, MemoryPressure.LOW),
        (12, MemoryPressure.MEDIUM),
        (15, MemoryPressure.MEDIUM),
        (16, MemoryPressure.HIGH),
        (18, MemoryPressure.HIGH),
        (19, MemoryPressure.CRITICAL),
        (20, MemoryPressure.CRITICAL),
    ],
)
def test_pressure_follows_the_blocks_that_sequences_hold(held_blocks: int, level: MemoryPressure) -> None:
    cache = make_cache(20)
    run_and_release(cache, prompt(500, 10))
    if held_blocks:
        run(cache, "s", list(range(4 * held_blocks)))
    assert cache.pressure is level and cache.stats().pressure is level
    assert cache.stats().utilisation == held_blocks / 20


def test_stats_count_lookups_and_empty_slots() -> None:
    cache = make_cache()
    run_and_release(cache, prompt(0, 3))
    run(cache, "s", prompt(0, 4))
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.hit_rate) == (3, 4, 3 / 7)
    assert stats.fragmentation == 3 / 20, "one token in the fifth block of four"
