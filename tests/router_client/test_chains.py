"""Requests that carry an engine's own block hashes, and workers whose blocks are keyed by them."""

import logging
from typing import Any

import pytest

from kvatlas.blocks.external_chain import external_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineState, FleetRecord
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from router_client import Fallbacks, Prompt, RequestHints, RouterClient, RouterSettings, StaticFleet
from tests.router_client.pools import SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

TOKENS = list(range(200))
NAMES = ["a", "b", "c"]
EXTERNAL = Scope("model", "tokenizer", chain="external:x")


async def hold_names(index: ResidencyIndex, record: FleetRecord, names: list[str], root: str = "root") -> None:
    assert record.endpoint.block_size is not None
    use = ScopeUse(EXTERNAL, record.endpoint.block_size)
    await index.put(use, record.endpoint.id, Tier.HBM, external_chain(names, root))


def client(index: ResidencyIndex, *records: FleetRecord) -> RouterClient:
    return RouterClient(
        index,
        StaticFleet(pool(*records)),
        RouterSettings(fallbacks=Fallbacks("model", "tokenizer"), deadline_ms=None),
    )


def hints(*names: str | int, **fields: Any) -> RequestHints:
    return RequestHints.parse({"block_hashes": names or NAMES, "chain": "external:x", **fields})


async def test_each_worker_is_found_by_its_own_kind_of_question(index: ResidencyIndex) -> None:
    own, other = worker("own"), worker("other", block_size=64, chain="external:x")
    await hold(index, own, TOKENS)
    await hold_names(index, other, NAMES)
    router = client(index, own, other)
    found = {one.worker_id: one for one in await router.overlap(hints(*NAMES, "d"))}
    assert (found["other"].resident_blocks, found["other"].usable_tokens, found["own"].resident_blocks) == (3, 192, 0)
    assert found["own"].explain() == (
        "own: 0 of 16 blocks (its blocks are keyed by chain own: the request's block hashes of chain external:x find none)"
    )
    found = {one.worker_id: one for one in await router.overlap(Prompt.of_tokens(SCOPE, TOKENS))}
    assert (found["own"].resident_blocks, found["other"].resident_blocks) == (12, 0)
    assert "chain external:x: the prompt's tokens find none" in found["other"].explain()
    ranking = await router.rank(hints(*NAMES, "d"))
    assert [(one.worker_id, one.overlap_blocks) for one in ranking] == [("other", 3), ("own", 0)]
    assert "keyed by chain own" in ranking.results[1].explain() and ranking.remarks == ()
    choice = await router.reserve(hints(*NAMES, "d"), dry_run=True)
    assert (choice.worker_id, choice.predicted_cached_tokens) == ("other", 192)


async def test_a_session_is_the_first_blocks_parent(index: ResidencyIndex) -> None:
    one = worker("w", block_size=64, chain="external:x")
    await hold_names(index, one, NAMES, "session-1")
    router = client(index, one)
    for session, blocks in (("session-1", 3), ("session-2", 0), (None, 0)):
        (found,) = await router.overlap(hints(session_id=session))
        assert found.resident_blocks == blocks


async def test_a_prompt_in_flight_counts_only_for_requests_of_its_chain(index: ResidencyIndex) -> None:
    router = client(index, worker("w", block_size=64, chain="external:x"))
    names = [f"block {at}" for at in range(17)]
    async with router.route(hints(*names)):
        for chain, tokens in (("external:x", 1024), ("external:y", 0), ("external:x", 1024)):
            (again,) = await router.rank(hints(*names, chain=chain))
            assert again.predicted_tokens == tokens


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"chain": "external:y"},
            "no worker's blocks are keyed by chain external:y, as the request's are; they use external:x and own",
        ),
        ({"block_tokens": 16}, "the request's block hashes have 16 tokens each; the workers' blocks have 64"),
        ({"colour": 1}, "unknown request field 'colour' ignored"),
    ],
)
async def test_what_is_asked_in_vain_is_said_in_each_answer_and_logged_once(
    index: ResidencyIndex, asked: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = worker("w", block_size=64, chain="external:x")
    await hold_names(index, one, NAMES)
    router = client(index, one, worker("own", block_size=16, state=EngineState.DOWN))
    with caplog.at_level(logging.WARNING, "router_client"):
        for _ in range(2):
            assert why in (await router.overlap(hints(**asked))).explain()
            assert why in (await router.rank(hints(**asked))).explain()
            assert why in (await router.reserve(hints(**asked), dry_run=True)).explain()
    assert [record.getMessage() for record in caplog.records] == [f"model model: {why}"]


async def test_a_pool_that_announced_nothing_yet_explains_nothing(index: ResidencyIndex) -> None:
    found = await client(index, worker("w", block_size=None)).overlap(hints())
    assert found.remarks == ()
