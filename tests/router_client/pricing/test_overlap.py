"""The part of a prompt that a pool holds, in tokens, over block sizes, granularities and chunks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import EngineKind, EngineState
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from router_client import Prompt, RouterClient, StaticFleet
from router_client.pricing.overlap import look_up_overlap
from router_client.pricing.pool import Pool
from router_client.prompt_chain import FIRST_BLOCKS, GROWTH
from tests.router_client.pools import SCOPE, CountingIndex, hold, pool, worker

pytestmark = pytest.mark.anyio

TOKENS = list(range(1, 3_000))


async def test_each_worker_has_resident_and_usable_tokens_by_tier(index: ResidencyIndex) -> None:
    tokens = TOKENS[:1_000]
    w1, w2, w3 = worker("w1"), worker("w2", kind=EngineKind.LMCACHE), worker("w3", state=EngineState.DOWN)
    await hold(index, w1, tokens, blocks=40)
    await hold(index, w1, tokens, blocks=10, tier=Tier.CPU_DRAM)
    await hold(index, w2, tokens, tier=Tier.CPU_DRAM)
    await hold(index, w3, tokens, blocks=1)
    records = pool(w1, w2, w3, worker("w4"), worker("w5", block_size=None))
    found = await RouterClient(index, StaticFleet(records)).overlap(Prompt.of_tokens(SCOPE, tokens))

    assert [w.worker_id for w in found] == ["w2", "w1", "w3", "w4", "w5"]
    by_id = {w.worker_id: w for w in found}
    assert (by_id["w1"].resident_blocks, by_id["w1"].resident_tokens, by_id["w1"].usable_tokens) == (40, 640, 640)
    assert by_id["w1"].tokens_by_tier == {Tier.HBM: 640}
    assert (by_id["w2"].resident_blocks, by_id["w2"].required_blocks) == (62, 63)
    assert by_id["w2"].tokens_by_tier == {Tier.CPU_DRAM: 992}
    assert (by_id["w3"].resident_tokens, by_id["w3"].routable) == (16, False)
    assert (by_id["w4"].resident_tokens, by_id["w4"].routable) == (0, True)
    assert by_id["w5"].block_size == 0
    assert found.of("w1") is by_id["w1"]
    assert found.of("w9") is None
    text = found.explain()
    assert "w1: 40 of 63 blocks, 640 tokens resident (640 in hbm), 640 usable" in text
    assert "w3: 1 of 63 blocks, 16 tokens resident (16 in hbm), 16 usable (gets no requests now)" in text


async def test_a_fully_resident_prompt_is_not_fully_usable(index: ResidencyIndex) -> None:
    w1 = worker("w1")
    await hold(index, w1, TOKENS[:64])
    (found,) = await RouterClient(index, StaticFleet(pool(w1))).overlap(Prompt.of_tokens(SCOPE, TOKENS[:64]))
    assert (found.resident_blocks, found.resident_tokens, found.usable_blocks, found.usable_tokens) == (4, 64, 3, 48)


async def test_tiers_change_along_a_prefix(index: ResidencyIndex) -> None:
    w1 = worker("w1")
    await hold(index, w1, TOKENS[:320], tier=Tier.CPU_DRAM)
    await hold(index, w1, TOKENS[:160], tier=Tier.HBM)
    (found,) = await RouterClient(index, StaticFleet(pool(w1))).overlap(Prompt.of_tokens(SCOPE, TOKENS[:321]))
    assert found.tokens_by_tier == {Tier.HBM: 160, Tier.CPU_DRAM: 160}


workers_of_any_cut = st.lists(
    st.tuples(st.sampled_from([1, 2, 4, 16]), st.sampled_from([1, 2, 3, 5]), st.integers(0, len(TOKENS))),
    min_size=1,
    max_size=6,
)


@given(cuts=workers_of_any_cut, count=st.integers(0, len(TOKENS)))
@settings(max_examples=60)
async def test_overlap_counts_in_tokens_for_every_block_size_and_granularity(
    cuts: list[tuple[int, int, int]], count: int
) -> None:
    index = MemoryIndex()
    tokens = TOKENS[:count]
    records = [worker(f"w{i}", block_size=size, granularity=g) for i, (size, g, _) in enumerate(cuts)]
    expected: dict[str, int] = {}
    for record, (size, g, depth) in zip(records, cuts, strict=True):
        await hold(index, record, TOKENS[:depth])
        if both := min(depth, count) // size // g * g * size:
            expected[record.endpoint.id] = both
    found = await look_up_overlap(index, Prompt.of_tokens(SCOPE, tokens), Pool.of(pool(*records)).block_shapes)
    assert {id: prefix.tokens for id, prefix in found.held.items()} == expected


@given(depths=st.lists(st.integers(0, 700), min_size=1, max_size=5))
@settings(max_examples=40)
async def test_ready_hashes_and_token_ids_give_the_same_overlap(depths: list[int]) -> None:
    index, tokens = MemoryIndex(), list(range(700))
    records = [worker(f"w{i}", block_size=1) for i in range(len(depths))]
    for record, depth in zip(records, depths, strict=True):
        await hold(index, record, tokens[:depth])
    shapes = Pool.of(pool(*records)).block_shapes
    hashed = await look_up_overlap(index, Prompt.of_hashes(SCOPE, extend_chain(tokens, 1), 1), shapes)
    given_tokens = await look_up_overlap(index, Prompt.of_tokens(SCOPE, tokens), shapes)
    assert hashed.held == given_tokens.held


async def test_a_long_cold_prompt_is_hashed_only_as_far_as_it_matches() -> None:
    index, w1 = MemoryIndex(), worker("w1")
    await hold(index, w1, TOKENS, blocks=20)
    counting = CountingIndex(index)
    for tokens, held in [(list(range(5_000, 205_000)), 0), ([*TOKENS[:320], *range(5_000, 205_000)], 320)]:
        counting.questions.clear()
        found = await look_up_overlap(counting, Prompt.of_tokens(SCOPE, tokens), Pool.of(pool(w1)).block_shapes)
        assert sum(prefix.tokens for prefix in found.held.values()) == held
        assert counting.questions == [FIRST_BLOCKS]
        assert (sum(chain.hashed_blocks for chain in found.chains.values()), found.round_trips) == (FIRST_BLOCKS, 1)


@pytest.mark.parametrize(("blocks", "round_trips"), [(0, 1), (512, 1), (1_023, 1), (1_024, 2), (9_215, 2), (9_216, 3)])
async def test_a_hit_takes_one_to_three_round_trips(blocks: int, round_trips: int) -> None:
    index, w1, tokens = MemoryIndex(), worker("w1", block_size=1), list(range(80_000))
    await hold(index, w1, tokens, blocks=blocks)
    counting = CountingIndex(index)
    found = await look_up_overlap(counting, Prompt.of_tokens(SCOPE, tokens), Pool.of(pool(w1)).block_shapes)
    assert sum(prefix.tokens for prefix in found.held.values()) == blocks
    assert counting.questions == [FIRST_BLOCKS * GROWTH**i for i in range(round_trips)]


async def test_workers_of_other_pools_do_not_lengthen_a_lookup() -> None:
    index, w1, stranger = MemoryIndex(), worker("w1", block_size=1), worker("stranger", block_size=1)
    await hold(index, stranger, TOKENS)
    counting = CountingIndex(index)
    await look_up_overlap(counting, Prompt.of_tokens(SCOPE, TOKENS), Pool.of(pool(w1)).block_shapes)
    assert counting.questions == [FIRST_BLOCKS]


async def test_ready_hashes_are_looked_up_at_once() -> None:
    index, w1 = MemoryIndex(), worker("w1", block_size=1)
    await hold(index, w1, TOKENS)
    counting = CountingIndex(index)
    await look_up_overlap(counting, Prompt.of_hashes(SCOPE, extend_chain(TOKENS, 1), 1), Pool.of(pool(w1)).block_shapes)
    assert counting.questions == [len(TOKENS)]


@pytest.mark.parametrize("fields", [{"block_size": 32}, {"block_size": None}])
async def test_hashes_of_another_block_size_match_nothing(fields: dict[str, Any]) -> None:
    counting = CountingIndex(MemoryIndex())
    prompt = Prompt.of_hashes(SCOPE, extend_chain(TOKENS, 16), 16)
    assert (await look_up_overlap(counting, prompt, Pool.of(pool(worker("w1", **fields))).block_shapes)).held == {}
    assert counting.questions == []


async def test_extra_keys_are_part_of_what_is_looked_up(index: ResidencyIndex) -> None:
    w1 = worker("w1")
    await hold(index, w1, TOKENS[:64])
    router = RouterClient(index, StaticFleet(pool(w1)))
    salted = Prompt.of_tokens(SCOPE, TOKENS[:64], extra_keys=[None, ["image", 0]])
    (found,) = await router.overlap(salted)
    assert found.resident_blocks == 1
