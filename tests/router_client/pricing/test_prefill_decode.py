"""`route_pd`: the workers for prompt and answer, checked against trying every pair."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, Load, Piece, Plan
from kvatlas.fleet.records import EngineKind, FleetRecord, Role
from kvatlas.index.memory.index import MemoryIndex
from router_client import (
    Advice,
    LimitSettings,
    NoWorkers,
    Over,
    PairChoice,
    PairSettings,
    Prompt,
    RouterClient,
    Selector,
    Slo,
    SloMode,
    StaticFleet,
)
from router_client.pricing.pool import UNKNOWN_DISPLACED
from tests.router_client.pools import BLOCK_BYTES, FETCH_BY, PEER, SCOPE, hold, pool, worker
from tests.router_client.pricing.pairs import PROMPT, QUEUED, SETTINGS, TOKENS, decode, prefill, router

pytestmark = pytest.mark.anyio


# ---------------------------------------------------------------- the choice


async def test_a_busy_decode_worker_gets_its_prompt_from_a_prefill_worker() -> None:
    client = await router(pool(prefill("p"), decode("d", load=QUEUED)))
    pair = await client.reserve_pd(PROMPT, dry_run=True)
    assert pair.prefill is not None
    assert (pair.prefill.worker_id, pair.worker_id) == ("p", "d")
    terms = {term.name: term for term in pair.decode.result.terms}
    assert (terms["backlog"].us, terms["prefill"].us, terms["transfer"].amount) == (0, 0, 8_000)
    assert pair.decode.source == "p"
    assert pair.score_us == pair.prefill.score_us + pair.decode.score_us
    assert pair.ttft_us == 8_000 * 40 + round(0.00065 * 8_000**2) + terms["transfer"].us


async def test_an_idle_decode_worker_computes_its_prompt_itself() -> None:
    pair = await (await router(pool(prefill("p", load=QUEUED), decode("d")))).reserve_pd(PROMPT, dry_run=True)
    assert (pair.prefill, pair.worker_id) == (None, "d")
    assert pair.score_us == pair.decode.score_us


async def test_few_new_tokens_are_computed_on_the_decode_worker() -> None:
    for least, apart in [(8_000, True), (8_001, False)]:
        client = await router(pool(prefill("p"), decode("d", load=QUEUED)), pairs=PairSettings(least_new_tokens=least))
        assert ((await client.reserve_pd(PROMPT, dry_run=True)).prefill is not None) == apart


async def test_cached_tokens_are_not_new_and_need_no_transfer() -> None:
    records = pool(prefill("p"), decode("d", load=QUEUED))
    for blocks, moved in [(400, 1_600), (490, None)]:  # of 500; 160 new tokens are fewer than 512
        index = MemoryIndex()
        await hold(index, records["d"], TOKENS, blocks=blocks)
        pair = await RouterClient(index, StaticFleet(records), SETTINGS).reserve_pd(PROMPT, dry_run=True)
        assert (pair.decode.result.transferred_tokens if pair.prefill else None) == moved


async def test_an_engine_that_can_not_do_both_gets_a_partner_however_short_the_prompt() -> None:
    sglang = {"kind": EngineKind.SGLANG}
    short = Prompt.of_tokens(SCOPE, [1, 2, 3])
    client = await router(pool(prefill("p", **sglang), decode("d", **sglang)))
    pair = await client.reserve_pd(short, dry_run=True)
    assert pair.prefill is not None and pair.prefill.worker_id == "p"
    alone = await router(pool(decode("d", **sglang), prefill("p", transfer_groups=("x",), **sglang)))
    with pytest.raises(NoWorkers, match=r"d \(it computes no prompts, and no prefill worker reaches it\)"):
        await alone.reserve_pd(short, dry_run=True)


async def test_kv_goes_only_within_a_transfer_group_and_the_nearer_the_cheaper() -> None:
    def records(*groups: str, size: int = 16, domain: str = "") -> dict[str, FleetRecord]:
        near = decode("d", load=QUEUED, transfer_groups=("g",), locality_domain="a")
        return pool(prefill("p", transfer_groups=groups, block_size=size, locality_domain=domain), near)

    near = await (await router(records("g", domain="a"))).reserve_pd(PROMPT, dry_run=True)
    far = await (await router(records("x", "g", domain="b"))).reserve_pd(PROMPT, dry_run=True)
    assert far.score_us - near.score_us == 350
    for other in (records("x"), records(), records("g", size=32)):
        assert (await (await router(other)).reserve_pd(PROMPT, dry_run=True)).prefill is None


async def test_the_worker_that_holds_the_prefix_becomes_the_prefill_worker() -> None:
    records = pool(prefill("p"), prefill("q"), decode("d", load=QUEUED))
    for holder in ("p", "q"):
        index = MemoryIndex()
        await hold(index, records[holder], TOKENS, blocks=200)
        pair = await RouterClient(index, StaticFleet(records), SETTINGS).reserve_pd(PROMPT, dry_run=True)
        assert pair.prefill is not None and pair.prefill.worker_id == holder
        assert pair.predicted_cached_tokens == 3_200


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, FleetRecord], dict[str, int]]:
    records, blocks = [], {}
    for number in range(draw(st.integers(1, 6))):
        record = worker(
            f"w{number}",
            role=draw(st.sampled_from(Role)),
            kind=draw(st.sampled_from([EngineKind.VLLM, EngineKind.SGLANG])),
            locality_domain=draw(st.sampled_from(["", "a"])),
            transfer_groups=draw(st.sampled_from([(), ("g",), ("g", "h"), ("h",)])),
            **draw(st.sampled_from([{}, PEER])),
            block_size=draw(st.sampled_from([16, 16, 32])),
            load=draw(
                st.fixed_dictionaries(
                    {"running_decodes": st.integers(0, 90), "queued_prefill_tokens": st.integers(0, 30_000)}
                )
            ),
        )
        records.append(record)
        blocks[f"w{number}"] = draw(st.sampled_from([0, 0, 20, 60]))
    return pool(*records), blocks


def naive(records: Mapping[str, FleetRecord], blocks: Mapping[str, int], tokens: int, least: int) -> list[int]:
    """The cost of each way: every worker that does both, and every pair."""
    profile = EngineProfile()

    def usable(id: str) -> int:
        size = records[id].endpoint.block_size or 0
        return min(blocks[id] * size, (tokens - 1) // size * size)

    def piece(id: str, count: int, *, own: bool = True, same_domain: bool = True) -> list[Piece]:
        bytes = -(-count * BLOCK_BYTES // (records[id].endpoint.block_size or 0))
        return [Piece(count, bytes, Tier.HBM, own, same_domain)] if count else []

    def own(id: str) -> list[Piece]:
        return piece(id, usable(id))

    def near(id: str, other: str) -> bool:
        return records[id].endpoint.locality_domain == records[other].endpoint.locality_domain

    def reported_load(id: str) -> Load:
        state = records[id].load
        assert state is not None
        return Load.of(state, 16)

    def alone_us(id: str, pieces: list[Piece]) -> int:
        return profile.price(Plan(id, tokens, 0, pieces)).score_us

    def plan(id: str, output: int) -> tuple[Plan, int]:
        """The plan with its own copy, or with that of another worker after it; and the cost of what that displaces."""
        ways = [(own(id), 0)]
        for other, theirs in records.items():
            me, it = records[id].endpoint, theirs.endpoint
            reached = set(me.transfer_groups or ("",)) & set(it.transfer_groups or ("",))
            if (
                me.kv_connector
                and it.kv_connector
                and me.kind is it.kind
                and reached
                and me.block_size == it.block_size
            ):
                more = max(0, usable(other) - usable(id))
                if more:
                    computing_us = alone_us(id, own(id)) - alone_us(id, [*own(id), *piece(id, more)])
                    way = [*own(id), *piece(id, more, own=False, same_domain=near(id, other))]
                    ways.append((way, round(UNKNOWN_DISPLACED * max(0, computing_us))))
        plans = [(Plan(id, tokens, output, way), displaced) for way, displaced in ways]
        return min(plans, key=lambda one: profile.price(one[0]).score_us + one[1])

    def whole(id: str, output: int) -> int:
        (mine, displaced), load = plan(id, output), reported_load(id)
        alone = profile.price(mine).ttft_us
        assert alone is not None
        waits = 0 if records[id].endpoint.role is Role.PREFILL else 0.4 * alone * load.running_decodes
        return profile.price(mine._replace(load=load)).score_us + displaced + round(waits)

    costs = []
    for id, record in records.items():
        me = record.endpoint
        if me.role is Role.PREFILL:
            continue
        able = me.role is Role.BOTH or me.kind is not EngineKind.SGLANG
        if able:
            costs.append(whole(id, 100))
        if able and plan(id, 100)[0].new_tokens < least:
            continue
        for other, theirs in records.items():
            it = theirs.endpoint
            if it.role is not Role.PREFILL or it.block_size != me.block_size:
                continue
            if me.kind is not it.kind or not set(it.transfer_groups or ("",)) & set(me.transfer_groups or ("",)):
                continue
            pieces = [*own(id), *piece(id, tokens - usable(id), own=False, same_domain=near(id, other))]
            answer = profile.price(Plan(id, tokens, 100, pieces, reported_load(id)._replace(queued_prefill_tokens=0)))
            costs.append(whole(other, 0) + answer.score_us)
    return costs


@given(fleets(), st.integers(1, 1_500), st.sampled_from([0, 300]))
@settings(max_examples=100)
async def test_no_worker_or_pair_is_cheaper_than_the_choice(
    fleet: tuple[dict[str, FleetRecord], dict[str, int]], tokens: int, least: int
) -> None:
    records, blocks = fleet
    index = MemoryIndex()
    for id, count in blocks.items():
        await hold(index, records[id], TOKENS, blocks=count)
    limits = LimitSettings(room=False)
    client = RouterClient(
        index, StaticFleet(records), replace(SETTINGS, limits=limits, pairs=PairSettings(least_new_tokens=least))
    )
    asked = replace(Prompt.of_tokens(SCOPE, TOKENS[:tokens], output_tokens=100), fetch_by=FETCH_BY)
    costs = naive(records, blocks, tokens, least)
    if not costs:
        with pytest.raises(NoWorkers):
            await client.reserve_pd(asked, dry_run=True)
        return
    pair = await client.reserve_pd(asked, dry_run=True)
    delayed = max(record.load.running_decodes for record in records.values() if record.load is not None)
    rounded = 4 + 0.4 * delayed  # each term to a microsecond, and the work before it is multiplied
    assert pair.score_us == pytest.approx(min(costs), abs=rounded)
    other = pair.ranking.alternative
    assert other is None or other.score_us >= pair.score_us - rounded


async def test_workers_that_only_decode_fetch_from_each_other() -> None:
    busy = {"running_decodes": 90}
    records = pool(
        worker("full", role=Role.DECODE, load=busy, **PEER), worker("free", role=Role.DECODE, load={}, **PEER)
    )
    index = MemoryIndex()
    await hold(index, records["full"], TOKENS, blocks=60)
    client = RouterClient(index, StaticFleet(records), SETTINGS)
    asked = replace(Prompt.of_tokens(SCOPE, TOKENS, output_tokens=100), fetch_by=FETCH_BY)
    pair = await client.reserve_pd(asked, dry_run=True)
    assert (pair.worker_id, pair.decode.source) == ("free", "full")


async def test_the_transfer_has_the_bytes_of_the_prefill_workers_blocks() -> None:
    """If unknown, those of the decode worker's."""
    transfers = []
    for sizes in ({"p": 4 << 20}, {"p": 1 << 20}, {"p": 0}, {"p": 4 << 20, "q": 1 << 20}):
        prefills = [
            prefill(id, block_bytes=size, load={"running_decodes": 9} if id == "p" else {})
            for id, size in sizes.items()
        ]
        client = await router(pool(*prefills, decode("d", load=QUEUED)))
        pair = await client.reserve_pd(PROMPT, dry_run=True)
        transfers.append({term.name: term.us for term in pair.decode.result.terms}["transfer"])
        assert pair.score_us >= pair.decode.score_us > transfers[-1]
    assert transfers == [100 + 25 * 4 * 500, 100 + 25 * 500, 100 + 25 * 500, 100 + 25 * 500]


# ---------------------------------------------------------------- policy and answers


async def test_policy_applies_to_both_workers_of_a_pair() -> None:
    zones = [prefill(f"p{n}", labels={"zone": str(n)}) for n in (1, 2)]
    answers = [decode(f"d{n}", labels={"zone": str(n)}, load=QUEUED) for n in (1, 2)]
    client = await router(pool(*zones, *answers), session_us=1_000.0)
    for n in ("1", "2"):
        pair = await client.reserve_pd(replace(PROMPT, select=Selector({"zone": n})), dry_run=True)
        assert pair.prefill is not None
        assert (pair.prefill.worker_id, pair.worker_id) == (f"p{n}", f"d{n}")
        assert len(pair.decode.ranking.left_out) == 2
    at = {(await client.reserve_pd(replace(PROMPT, session_id=str(n)), dry_run=True)).worker_id for n in range(20)}
    assert at == {"d1", "d2"}


async def test_a_pair_that_misses_its_slo_says_so() -> None:
    records = pool(
        prefill("p", load={"queued_prefill_tokens": 60_000}), decode("d", load={"queued_prefill_tokens": 90_000})
    )
    for mode in SloMode:
        client = await router(records, limits=LimitSettings(slo=mode, shed_factor=4))
        late = await client.reserve_pd(replace(PROMPT, slo=Slo(ttft_ms=1_000)), dry_run=True)
        assert late.prefill is not None
        assert late.over == Over.TTFT
        assert (late.advice, late.retry_after_s) == (Advice.QUEUE, 2)
        assert (await client.reserve_pd(replace(PROMPT, slo=Slo(ttft_ms=500)), dry_run=True)).advice is Advice.SHED
        assert (await client.reserve_pd(replace(PROMPT, slo=Slo(ttft_ms=5_000)), dry_run=True)).advice is Advice.GO


async def test_a_pair_explains_itself() -> None:
    records = pool(prefill("p", base_url="http://p", dp_rank=1), decode("d", base_url="http://d", load=QUEUED))
    pair: PairChoice = await (await router(records)).reserve_pd(PROMPT, dry_run=True)
    assert pair.prefill is not None
    assert (pair.prefill.url, pair.prefill.headers) == ("http://p", {"X-Data-Parallel-Rank": "1"})
    assert (pair.url, pair.headers) == ("http://d", {})
    lines = pair.explain().splitlines()
    assert lines[0] == f"{pair.score_us} us together"
    assert lines[1] == "  prefill: p at http://p"
    assert any(line.startswith("  decode: d at http://d") for line in lines)
    assert lines[-1].startswith("  without a separate prefill, ") and "us more: d: " in lines[-1]
    data = json.loads(json.dumps(pair.explanation()))
    assert (data["prefill"]["worker"], data["decode"]["worker"]) == ("p", "d")
    assert data["otherwise"]["prefill"] is None
    alone = await (await router(pool(worker("w"), prefill("p", load=QUEUED)))).reserve_pd(PROMPT, dry_run=True)
    assert alone.explain().startswith("no separate prefill: w at ")
    assert "  with one, " in alone.explain()


async def test_the_worked_example_of_the_documentation() -> None:
    records = pool(prefill("p1"), decode("d1", load=QUEUED))
    index = MemoryIndex()
    await hold(index, records["p1"], TOKENS, blocks=200)
    pair = await RouterClient(index, StaticFleet(records), SETTINGS).reserve_pd(PROMPT, dry_run=True)
    assert pair.prefill is not None
    assert (pair.score_us, pair.prefill.score_us, pair.decode.score_us) == (1_186_744, 226_944, 959_800)
    other = pair.ranking.alternative
    assert other is not None and other.score_us - pair.score_us == 922_056
