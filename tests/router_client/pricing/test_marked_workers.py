"""Workers with marks: the usable part of what they hold, why it ends there, and what a copy on them is worth."""

from dataclasses import replace

import pytest

from kvatlas.blocks.hashing import extend_chain, lazy_chain
from kvatlas.blocks.reuse import CacheReading
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from router_client import Prompt, RouterClient
from router_client.pricing.overlap import ResidencyOnly
from tests.kvatlas.index.message_source import MessageSource, apply_messages, split
from tests.router_client.pools import FETCH_BY, PEER, CountingFleet

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "model")
SIZE = 4
TOKENS = list(range(4 * 700 + 3))
CHAIN = extend_chain(TOKENS, SIZE)
PLACES = {key: (split(CHAIN)[i // 64 * 64], i % 64) for i, key in enumerate(split(CHAIN))}


def record(id: str, **fields: object) -> FleetRecord:
    endpoint = EngineEndpoint(
        id=id, kind=EngineKind.VLLM, model_id="model", tokenizer_id="model", block_size=SIZE, block_bytes=1000
    ).model_copy(update=fields)
    return FleetRecord(endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE)


async def index_of(**marks: list[int] | None) -> MemoryIndex:
    """An index in which every worker holds the whole chain; those with a list have marks at these positions."""
    index = MemoryIndex()
    for worker, positions in marks.items():
        source = MessageSource(worker, dropped=None if positions is None else 0, places=PLACES)
        await apply_messages(index, source.begin(1), source.store(SCOPE, CHAIN))
        if positions:
            await apply_messages(index, source.mark(SCOPE, [split(CHAIN)[at - 1] for at in positions]))
    return index


async def test_usable_ends_at_the_deepest_mark_over_all_parts_of_a_long_prompt() -> None:
    index = await index_of(near=[100, 255], far=[100, 650], none=[], full=None)
    workers = {id: record(id, marks=id != "full") for id in ("near", "far", "none", "full")}
    async with RouterClient(index, CountingFleet(workers)) as router:
        found = await router.overlap(Prompt.of_tokens(SCOPE, TOKENS))
        usable = {worker.worker_id: worker.usable_tokens for worker in found}
        assert usable == {"full": 2800, "far": 2600, "near": 1020, "none": 0}
        assert {worker.resident_tokens for worker in found} == {2800}
        assert {worker.worker_id: worker.why for worker in found} == {
            "full": "",
            "far": "after that, no group other than full attention holds what it needs to resume",
            "near": "after that, no group other than full attention holds what it needs to resume",
            "none": "at no point do the groups other than full attention hold what they need to resume",
        }
        ranking = await router.rank(Prompt.of_tokens(SCOPE, TOKENS))
        assert [result.worker_id for result in ranking] == ["full", "far", "near", "none"]
        short = await router.overlap(Prompt.of_tokens(SCOPE, TOKENS[: 4 * 650]))
        assert {w.worker_id: w.usable_tokens for w in short}["far"] == 400, "the prompt's last token is computed"


async def test_without_marks_all_that_is_resident_counts_as_usable() -> None:
    index = await index_of(w=[100])
    async with RouterClient(ResidencyOnly(index), CountingFleet({"w": record("w", marks=True)})) as router:
        [mine] = await router.overlap(Prompt.of_tokens(SCOPE, TOKENS))
        assert mine.usable_tokens == mine.resident_tokens == 2800


async def test_a_worker_whose_hashes_cover_tokens_behind_a_block_is_looked_up_by_a_chain_of_its_own() -> None:
    index, source, plain = MemoryIndex(), MessageSource("ahead"), MessageSource("plain")
    ahead_chain = b"".join(lazy_chain(TOKENS, SIZE, 256, lookahead_tokens=2))
    await apply_messages(index, source.begin(1), source.store(SCOPE, ahead_chain[: 8 * 500]))
    await apply_messages(index, plain.begin(1), plain.store(SCOPE, CHAIN[: 8 * 300]))
    workers = {"ahead": record("ahead", lookahead_tokens=2), "plain": record("plain")}
    fork = [*TOKENS[: 4 * 500], *range(90_000, 90_100)]
    async with RouterClient(index, CountingFleet(workers)) as router:
        for tokens, usable in ((TOKENS, 2_000), (fork, 1_996), (TOKENS[: 4 * 500 + 1], 1_996), (TOKENS[:2_002], 2_000)):
            found = await router.overlap(Prompt.of_tokens(SCOPE, tokens))
            assert {w.worker_id: w.usable_tokens for w in found} == {"ahead": usable, "plain": 1_200}
            ranking = await router.rank(Prompt.of_tokens(SCOPE, tokens))
            assert [result.worker_id for result in ranking] == ["ahead", "plain"]


async def test_a_request_that_skips_the_cache_uses_nothing_of_it() -> None:
    index = await index_of(w=[100], full=None)
    workers = {"w": record("w", marks=True), "full": record("full")}
    async with RouterClient(index, CountingFleet(workers)) as router:
        prompt = replace(Prompt.of_tokens(SCOPE, TOKENS), reading=CacheReading(prompt_logprobs=True))
        found = await router.overlap(prompt)
        assert {worker.usable_tokens for worker in found} == {0}
        assert {worker.why for worker in found} == {"the request lets the engine read 0 tokens from its cache"}
        assert {result.cached_tokens for result in await router.rank(prompt)} == {0}


async def test_a_copy_is_worth_what_its_holders_marks_allow() -> None:
    index = await index_of(source=[300])
    fields = {**PEER, "marks": True}
    workers = {id: record(id, **fields) for id in ("source", "reader")}
    async with RouterClient(index, CountingFleet(workers)) as router:
        ranking = {
            result.worker_id: result
            for result in await router.rank(replace(Prompt.of_tokens(SCOPE, TOKENS), fetch_by=FETCH_BY))
        }
        assert ranking["source"].usable_tokens == 1200
        reader = ranking["reader"]
        assert (reader.usable_tokens, reader.transferred_tokens, reader.source) == (0, 1200, "source")


async def test_an_upper_bound_is_labelled_with_its_reason() -> None:
    index = await index_of(w=None)
    workers = {"w": record("w", upper_bound="the engine reports full attention only")}
    async with RouterClient(index, CountingFleet(workers)) as router:
        [worker] = await router.overlap(Prompt.of_tokens(SCOPE, TOKENS))
        assert "at most 2800 usable (upper bound: the engine reports full attention only)" in worker.explain()
        [result] = await router.rank(Prompt.of_tokens(SCOPE, TOKENS))
        assert "at most 2800 tokens usable (the engine reports full attention only)" in result.explain()
        assert result.explanation()["upper_bound"] == "the engine reports full attention only"
