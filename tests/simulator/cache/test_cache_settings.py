"""The cache as a user of it alone sees it: tables, handles, sentences, limits."""

import runpy
from pathlib import Path

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache import (
    AllocationRequest,
    BlockTable,
    CacheError,
    DataType,
    InsufficientBlocks,
    KVCache,
    KVGeometry,
    MemoryPressure,
    Namespace,
    PrefixSettings,
    PressureThresholds,
    Priority,
)

ROOT = Path(__file__).parents[3]


def test_a_block_table_knows_where_each_token_is() -> None:
    table = BlockTable(4, [7, 2, 5], length=9)
    assert (len(table), table.length, table.free_tokens) == (3, 9, 3)
    assert [table.blocks_needed(length) for length in (0, 1, 4, 5, 13)] == [0, 1, 1, 2, 4]
    assert [table.slot(position) for position in (0, 5, 8)] == [(7, 0), (2, 1), (5, 0)]
    with pytest.raises(InvalidValue, match="position is 9; expected 0 to 8"):
        table.slot(9)


def test_a_block_table_can_not_be_longer_than_its_blocks() -> None:
    table = BlockTable(4, [7, 2], length=3)
    with pytest.raises(InsufficientBlocks, match=r"^insufficient blocks: need 3, have 2$"):
        table.length = 9
    assert table.length == 3


def test_bytes_are_two_times_layers_heads_head_size_tokens_and_bytes_of_the_data_type() -> None:
    request = AllocationRequest(1, range(100))
    assert request.estimated_bytes(KVGeometry(32, 8, 128, DataType.FLOAT16)) == 2 * 32 * 8 * 128 * 100 * 2
    sizes = {data_type.value: KVGeometry(1, 1, 1, data_type).bytes_of(1) // 2 for data_type in DataType}
    assert sizes == {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}


def test_a_handle_tells_its_sequences_memory_and_last_access() -> None:
    now = [5.0]
    cache = KVCache(num_blocks=8, block_size=4, num_cpu_blocks=8, geometry=KVGeometry(2, 2, 8), clock=lambda: now[0])
    handle = cache.allocate(AllocationRequest(1, range(6)))
    now[0] = 7.0
    cache.extend(1, [9, 9, 9, 9])
    stats = handle.stats()
    assert (stats.blocks, stats.tokens, stats.utilisation, stats.last_access) == (3, 10, 10 / 12, 7.0)
    assert stats.memory_bytes == 3 * 4 * 2 * 2 * 2 * 8 * 2 == cache.stats().memory_bytes
    assert handle.block_table().free_tokens == 2
    cache.swap_out(1)
    assert (handle.stats().blocks, handle.stats().tokens, handle.stats().memory_bytes) == (0, 10, 0)
    cache.free(1)
    with pytest.raises(CacheError, match=r"^sequence 1 not found$"):
        handle.stats()


def test_errors_are_sentences_and_change_nothing() -> None:
    cache = KVCache(num_blocks=4, block_size=4, num_cpu_blocks=2)
    cache.allocate(AllocationRequest(7, range(12)))
    before = (cache.take_events(), cache.block_table(7).block_ids, cache.available_blocks)
    for call, sentence in (
        (lambda: cache.extend(999, [1]), "sequence 999 not found"),
        (lambda: cache.free("none"), "sequence none not found"),
        (lambda: cache.fork(999, 8), "sequence 999 not found"),
        (lambda: cache.fork(7, 7), "sequence 7 exists already"),
        (lambda: cache.allocate(AllocationRequest(7, [1])), "sequence 7 exists already"),
        (lambda: cache.allocate(AllocationRequest(8, range(50, 58))), "insufficient blocks: need 2, have 1"),
        (lambda: cache.extend(7, range(5)), "insufficient blocks: need 2, have 1"),
        (lambda: cache.swap_out(7), "insufficient blocks: need 3, have 2"),
    ):
        with pytest.raises(CacheError) as caught:
            call()
        assert str(caught.value) == sentence
    for call, sentence in (
        (lambda: cache.swap_in(7), "sequence 7 is not swapped out"),
        (lambda: cache.fork(7, 8, blocks=4), "sequence 7 has 3 blocks; expected to share at most these, not 4"),
    ):
        with pytest.raises(InvalidValue) as invalid:
            call()
        assert str(invalid.value) == sentence
    assert (cache.take_events(), cache.block_table(7).block_ids, cache.available_blocks) == ((), *before[1:])
    assert cache.stats().failures == 3


def test_settings_that_make_no_sense_are_refused_by_name() -> None:
    for make, sentence in (
        (lambda: KVCache(num_blocks=0, block_size=4), "a cache of 0"),
        (lambda: PrefixSettings(max_prefixes=0), "max_prefixes is 0; expected at least 1"),
        (lambda: PrefixSettings(min_tokens=-1), "min_tokens is -1"),
        (lambda: PrefixSettings(ttl_s=float("nan")), "ttl_s is nan; expected more than 0"),
        (lambda: PressureThresholds(0.9, 0.8), "thresholds are 0.9, 0.8, 0.95"),
        (lambda: KVGeometry(heads=0), "heads is 0; expected at least 1"),
    ):
        with pytest.raises(InvalidValue, match=sentence):
            make()


def test_a_swapped_out_sequence_keeps_its_content_and_takes_only_what_is_missing_back() -> None:
    cache = KVCache(num_blocks=4, block_size=4, num_cpu_blocks=4)
    tokens = list(range(14))
    cache.allocate(AllocationRequest(1, tokens))
    assert cache.swap_out(1) == 4 == cache.stats().swapped_out and cache.available_blocks == 4
    assert cache.read(1) == tokens and not cache.preemption_order()
    with pytest.raises(CacheError, match=r"^sequence 1 is swapped out; swap it in first$"):
        cache.extend(1, [0])
    cache.allocate(AllocationRequest(2, range(100, 106)))
    with pytest.raises(InsufficientBlocks, match="need 4, have 2"):
        cache.swap_in(1)
    cache.free(2)
    assert cache.swap_in(1) == 2, "two blocks were still cached"
    assert cache.read(1) == tokens and (cache.stats().swapped_in, cache.stats().swap_blocks) == (2, 0)


def test_the_lowest_priority_gives_way_first_and_then_the_youngest() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    for name, priority in (("a", Priority.LOW), ("b", Priority.NORMAL), ("c", Priority.LOW), ("d", Priority.HIGH)):
        cache.allocate(AllocationRequest(name, [1, 2, 3], priority=priority))
    cache.fork("d", "e", priority=Priority.NORMAL)
    assert cache.preemption_order() == ["c", "a", "e", "b", "d"]


def test_without_sharing_nothing_is_cached_or_announced() -> None:
    cache = KVCache(num_blocks=8, block_size=4, prefixes=PrefixSettings(sharing=False))
    for name in ("a", "b"):
        cache.allocate(AllocationRequest(name, range(9)))
        cache.free(name)
    assert cache.stats().hit_rate == 0 and cache.stats().cached_blocks == 0 and not cache.take_events()


def test_a_prefix_is_cached_once_it_is_long_enough_and_only_once_for_two_forks() -> None:
    cache = KVCache(num_blocks=8, block_size=4, prefixes=PrefixSettings(min_tokens=8))
    cache.allocate(AllocationRequest("a", [1, 2, 3, 4]))
    cache.fork("a", "b")
    assert not cache.take_events()
    cache.extend("a", [5, 6, 7, 8])
    cache.extend("b", [5, 6, 7, 8])
    assert cache.stats().cached_blocks == 3, "the first block is theirs together, the second is each one's own"
    assert cache.match([1, 2, 3, 4, 9], Namespace()).hit_tokens == 0
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9], Namespace()).hit_tokens == 8


def test_levels_of_pressure_are_ordered_and_a_callback_may_use_the_cache() -> None:
    seen: list[tuple[str, str]] = []

    def relieve(before: MemoryPressure, now: MemoryPressure) -> None:
        seen.append((before.label, now.label))
        if now >= MemoryPressure.HIGH:
            cache.free(cache.preemption_order()[0])

    cache = KVCache(num_blocks=10, block_size=4, on_pressure=relieve)
    cache.allocate(AllocationRequest(1, range(24)))
    cache.allocate(AllocationRequest(2, range(50, 62)))
    assert seen == [("low", "medium"), ("medium", "high"), ("high", "medium")]
    assert cache.sequence_ids == (1,) and cache.pressure is MemoryPressure.MEDIUM


def test_the_example_prints_the_lines_that_the_documentation_shows(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples/cache_manager.py"), run_name="__main__")
    printed = iter(capsys.readouterr().out.splitlines())
    page = (ROOT / "docs/cache-manager.md").read_text()
    shown = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    assert len(shown) > 5 and all(line in printed for line in shown), "another text, or another order"
