"""A paged cache's own unit tests, in our words, on the lenient `PagedCache`; next to them, what `KVCache` refuses."""

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache import (
    AllocationRequest,
    BuiltInPolicy,
    InsufficientBlocks,
    KVCache,
    KVGeometry,
    PagedCache,
    SequenceExists,
    SequenceNotFound,
)

GEOMETRY = KVGeometry(layers=32, heads=32, head_size=128)


def cache(blocks: int, eviction: BuiltInPolicy = BuiltInPolicy.LRU) -> PagedCache:
    return PagedCache(num_blocks=blocks, block_size=16, eviction=eviction, geometry=GEOMETRY)


def test_one_block_is_allocated_empty() -> None:
    one = cache(100)
    block = one.allocate_block(1)
    assert one.free_blocks == 99 and one.block_table(1) == (block,) and one.cached_tokens(1) == 0
    one.append_token(1)
    assert one.block_table(1) == (block,) and one.cached_tokens(1) == 1


def test_blocks_for_tokens_and_their_end() -> None:
    one = cache(100)
    assert len(one.allocate_for_tokens(1, 50)) == 4 and one.free_blocks == 96
    assert one.cached_tokens(1) == 50 and one.memory_bytes == 4 * GEOMETRY.bytes_of(16)
    one.free(1)
    assert one.free_blocks == 100 and one.block_table(1) is None and one.memory_bytes == 0
    with pytest.raises(SequenceNotFound):
        one.free(1)


def test_a_token_is_appended_to_a_sequence_that_is_not_known_yet() -> None:
    one = cache(10)
    first = one.append_token(1)
    assert [one.append_token(1) for _ in range(15)] == [first] * 15 and one.cached_tokens(1) == 16
    assert one.append_token(1) != first and (one.cached_tokens(1), one.free_blocks) == (17, 8)
    with pytest.raises(SequenceNotFound):
        KVCache(num_blocks=10, block_size=16).extend(1, [5])


def test_an_unknown_sequence_has_no_tokens() -> None:
    assert cache(10).cached_tokens(999) == 0
    with pytest.raises(SequenceNotFound):
        KVCache(num_blocks=10, block_size=16).block_table(999)


def test_a_shared_block_is_copied_on_write() -> None:
    one = cache(20)
    one.allocate_for_tokens(1, 20)
    one.share_prefix(1, 2, 2)
    assert one.free_blocks == 18 and one.cached_tokens(2) == 20
    copy = one.append_token(2)
    assert one.stats.copies == 1 and copy not in (one.block_table(1) or ()) and one.free_blocks == 17
    assert (one.cached_tokens(1), one.cached_tokens(2)) == (20, 21)
    assert one.stats.allocations == 2  # a copy counts as only one


def test_a_prefix_is_shared_onto_a_sequence_that_exists() -> None:
    one = cache(20)
    shared = one.allocate_for_tokens(1, 32)
    own = one.allocate_block(2)
    one.share_prefix(1, 2, 1)
    assert one.block_table(2) == (own, shared[0])
    with pytest.raises(InvalidValue, match="sequence 1 has 2 blocks; expected to share at most these, not 3"):
        one.share_prefix(1, 2, 3)
    with pytest.raises(SequenceNotFound):
        one.share_prefix(9, 2, 1)
    strict = KVCache(num_blocks=20, block_size=16)
    for name in (1, 2):
        strict.allocate(AllocationRequest(name, [name]))
    with pytest.raises(SequenceExists):
        strict.fork(1, 2)


def test_a_registered_prefix_is_found_by_the_callers_hash_and_stays() -> None:
    one = cache(20)
    blocks = one.allocate_for_tokens(1, 32)
    one.register_prefix(0x1234, blocks)
    assert one.lookup_prefix(0x1234) == tuple(blocks) and one.lookup_prefix(0xDEAD) is None
    assert (one.stats.hits, one.stats.misses, one.stats.hit_rate) == (1, 1, 0.5)
    one.free(1)
    assert one.free_blocks == 18 and one.lookup_prefix(0x1234) == tuple(blocks)
    one.register_prefix(0x1234, blocks[:1])  # replaced
    assert one.free_blocks == 19
    assert one.forget_prefix(0x1234) and not one.forget_prefix(0x1234) and one.free_blocks == 20
    with pytest.raises(InvalidValue, match="is not allocated"):
        one.register_prefix(1, blocks)


@pytest.mark.parametrize(
    ("policy", "victim"), [(BuiltInPolicy.LRU, 1), (BuiltInPolicy.FIFO, 0), (BuiltInPolicy.FREQUENCY, 2)]
)
def test_a_block_that_one_sequence_holds_gives_way(policy: BuiltInPolicy, victim: int) -> None:
    one = cache(4, policy)
    blocks = [one.allocate_block(name) for name in range(4)]
    for name, tokens in ((1, 1), (2, 0), (3, 1), (0, 1)):
        for _ in range(tokens):
            one.append_token(name)
    if policy is not BuiltInPolicy.FREQUENCY:
        one.append_token(2)  # used last, and as often as the others
    taken = one.allocate_block(5)
    assert taken == blocks[victim] and one.block_table(victim) == () and one.stats.evictions == 1
    strict = KVCache(num_blocks=1, block_size=16)
    strict.allocate(AllocationRequest("a", [1]))
    with pytest.raises(InsufficientBlocks):
        strict.allocate(AllocationRequest("b", [2]))


def test_shared_blocks_never_give_way_and_a_refused_call_changes_nothing() -> None:
    one = cache(2)
    one.allocate_for_tokens(1, 32)
    one.share_prefix(1, 2, 2)
    with pytest.raises(InsufficientBlocks):
        one.allocate_for_tokens(3, 16)
    assert one.block_table(3) is None and one.free_blocks == 0 and one.stats.evictions == 0
    one.free(2)
    with pytest.raises(InsufficientBlocks):
        one.allocate_for_tokens(3, 48)
    assert one.cached_tokens(1) == 32


def test_fragmentation_is_of_blocks_that_are_not_full() -> None:
    one = cache(20)
    assert one.fragmentation == 0
    one.allocate_for_tokens(1, 17)
    assert one.fragmentation == 0.5
    slots = KVCache(num_blocks=20, block_size=16)
    slots.allocate(AllocationRequest(1, range(17)))
    assert slots.stats().fragmentation == 15 / 32  # of slots


def test_allocations_are_counted() -> None:
    one = cache(20)
    assert one.stats.hit_rate == 0
    one.allocate_for_tokens(1, 32)
    assert one.utilisation == 2 / 20
    one.free(1)
    assert (one.stats.allocations, one.stats.deallocations, one.utilisation) == (2, 2, 0)


@pytest.mark.parametrize(("blocks", "size"), [(10, 0), (0, 16)])
def test_an_impossible_cache_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(InvalidValue):
        PagedCache(num_blocks=blocks, block_size=size)
