"""Choices among many workers that read few of them: what they choose, and what they still explain."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, EngineRates
from kvatlas.fleet.records import EngineState, FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.request import Slo
from kvatlas.reservations import RedisReservations
from kvatlas.reservations.lookup import MOST_LOOKED_UP_CHAINS
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from router_client import Basis, NoWorkers, Prompt, RouterClient, RouterSettings, Selector, StaticFleet
from router_client.pricing.look_alikes import LEAST_CANDIDATES
from router_client.pricing.lookups import quote_lookup
from router_client.pricing.pool import Pool
from router_client.pricing.surcharges import session_worker
from router_client.settings import LimitSettings, SloMode
from tests.kvatlas.reservations.asks import Clock
from tests.router_client.pools import FETCH_BY, PEER, SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

SETTINGS = RouterSettings(deadline_ms=None)
TOKENS = [5] * 2_000
COUNT = 60


def busy(rng: random.Random, number: int, **other: Any) -> FleetRecord:
    metrics = {"total_request_slots": 24, "active_kv_blocks": rng.randrange(3_000), "total_kv_blocks": 4_000}
    load = {
        "running_decodes": rng.randrange(1, 25),
        "queued_prefill_tokens": rng.randrange(4_000),
        "forward_pass": metrics,
        "sampled_us": time.time_ns() // 1_000,
    }
    return worker(f"w{number:03}", load=None if number % 11 == 7 else load, **other)


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    return await open_redis_index(store, writer=True)


@pytest.fixture
async def fleet(store: Store, index: RedisIndex) -> AsyncIterator[FleetStore]:
    yield FleetStore(store)
    await store.client.function_flush()  # of a clock that one test sets


def router(
    index: RedisIndex, store: Store, settings: RouterSettings = SETTINGS, *, looks_up: bool = True
) -> RouterClient:
    return RouterClient(
        index, FleetStore(store), settings, reservations=RedisReservations(store, index if looks_up else None)
    )


@pytest.mark.parametrize("looks_up", [True, False])
@pytest.mark.parametrize("seed", range(6))
async def test_the_choice_is_the_cheapest_of_all(
    store: Store, index: RedisIndex, fleet: FleetStore, seed: int, looks_up: bool
) -> None:
    """Compared with the ranking of every candidate while bookings grow: holders, tiers, two kinds of engines or speeds, copies
    to read, workers with unknown load, full ones."""
    await Clock(store).prepare()  # rank and book find the same predictions
    rng = random.Random(seed)
    groups: dict[str, Any] = dict(PEER) if seed == 1 else {}
    records = pool(
        *(busy(rng, n, kind="sglang" if seed == 2 and n % 3 else "vllm", **groups) for n in range(COUNT)),
        worker("down", state=EngineState.DOWN),
    )
    await fleet.write(records)
    for number in rng.sample(range(COUNT), 55 if seed in (3, 5) else 6):
        blocks = 10 if seed == 3 and number % 9 else rng.randrange(1, 120)
        tier = rng.choice([Tier.HBM, Tier.HBM, Tier.CPU_DRAM]) if seed < 4 else Tier.HBM
        await hold(index, records[f"w{number:03}"], TOKENS, blocks=blocks, tier=tier)
    slow = EngineRates(prefill_us_per_token=80.0, tpot_base_us=14_000.0)
    profile = EngineProfile(by_worker={id: slow for id in records if id[-1] in "147"} if seed == 4 else {})
    client = router(index, store, replace(SETTINGS, profile=profile), looks_up=looks_up)
    fewest = COUNT
    for number in range(40):
        tokens = [*TOKENS[: rng.choice([100, 1_500, 2_000])], *range(number % 5 * 200)]
        asked = replace(Prompt.of_tokens(SCOPE, tokens, output_tokens=rng.choice([1, 128, 700])), fetch_by=FETCH_BY)
        ranked = (await client.rank(asked)).results
        cheapest = {result.worker_id for result in ranked if result.score_us <= ranked[0].score_us + 1}
        choice = await client.reserve(asked)
        assert choice.basis is Basis.COST and not choice.why
        assert choice.worker_id in cheapest, (choice.explain(), ranked[0].explain())
        assert abs(choice.score_us - ranked[0].score_us) <= 1
        assert sum(term.us for term in choice.result.terms) == choice.score_us
        assert choice.ranking.unread + len(choice.ranking) == COUNT
        fewest = min(fewest, len(choice.ranking))
    assert fewest < COUNT / 2


@pytest.mark.parametrize("seed", range(4))
async def test_one_call_to_a_small_pool_chooses_as_two_and_explains_every_candidate(
    store: Store, index: RedisIndex, fleet: FleetStore, seed: int
) -> None:
    """Including ties. Odd seeds: idle workers, all equally fast."""
    await Clock(store).prepare()
    rng = random.Random(seed)
    count = rng.choice([1, 4, LEAST_CANDIDATES - 1])
    records = pool(
        *(worker(f"w{n:03}") if seed % 2 else busy(rng, n, block_size=rng.choice([16, 16, 32])) for n in range(count)),
        worker("down", state=EngineState.DOWN),
    )
    await fleet.write(records)
    for number in rng.sample(range(count), count // 2):
        await hold(index, records[f"w{number:03}"], TOKENS, blocks=rng.randrange(1, 60))
    slow = EngineRates(prefill_us_per_token=80.0, tpot_base_us=14_000.0)
    profile = EngineProfile(by_worker={} if seed % 2 else {id: slow for id in records if id[-1] in "147"})
    settings = replace(SETTINGS, profile=profile, session_us=50_000.0, explain_all=seed == 2, fleet_max_age_ms=600_000)
    one, two = router(index, store, settings), router(index, store, settings, looks_up=False)
    assert await one.workers(SCOPE) == records
    for number in range(30):
        tokens = [*TOKENS[: rng.choice([5, 100, 1_500, 2_000])], *range(number % 5 * 200)]
        asked = Prompt.of_tokens(SCOPE, tokens, output_tokens=rng.choice([1, 128]), session_id=rng.choice([None, "s"]))
        avoid = rng.sample(sorted(records), number % 2 if count > 1 else 0)
        expected = await two.reserve(asked, avoid=avoid, dry_run=True)
        await store.client.config_resetstat()
        choice = await one.reserve(asked, avoid=avoid)
        calls = await store.client.info("commandstats")
        assert calls["cmdstat_fcall"]["calls"] == 1 and "cmdstat_fcall_ro" not in calls
        assert (choice.worker_id, choice.basis, choice.why) == (expected.worker_id, Basis.COST, "")
        assert choice.ranking.results == expected.ranking.results
        assert choice.ranking == expected.ranking


@pytest.mark.parametrize("shapes", [MOST_LOOKED_UP_CHAINS, MOST_LOOKED_UP_CHAINS + 1])
async def test_more_shapes_of_blocks_than_one_call_looks_up_are_looked_up_apart(
    store: Store, index: RedisIndex, fleet: FleetStore, shapes: int
) -> None:
    records = pool(*(worker(f"w{n:03}", block_size=4 * (n % shapes + 1)) for n in range(COUNT)))
    await fleet.write(records)
    await hold(index, records["w041"], TOKENS)
    asked = Prompt.of_tokens(SCOPE, TOKENS)
    client = router(index, store)
    in_one_call = quote_lookup(asked, Pool.of(records), b"") is not None
    assert in_one_call is (shapes <= MOST_LOOKED_UP_CHAINS)
    choice = await client.reserve(asked)
    assert (choice.worker_id, choice.basis, choice.why) == ("w041", Basis.COST, "")


@pytest.mark.parametrize("count", [LEAST_CANDIDATES - 1, COUNT])
async def test_a_pool_of_very_many_shapes_is_chosen_from_by_the_common_ones(
    store: Store, index: RedisIndex, fleet: FleetStore, count: int
) -> None:
    """Nothing counts as held in the others, as a remark says, and an odd worker makes no other pool's choices worse."""
    shapes = 40 if count == COUNT else count
    records = pool(
        *(worker(f"w{n:03}", block_size=4 * (n % shapes + 1), events=n % 5 != 0) for n in range(count)),
        *(worker(f"common{n}", block_size=256) for n in range(3)),
    )
    await fleet.write(records)
    await hold(index, records["common1"], TOKENS)
    await hold(index, records[f"w{shapes - 1:03}"], TOKENS)
    client, asked = router(index, store), Prompt.of_tokens(SCOPE, TOKENS)
    for _ in range(3):
        choice = await client.reserve(asked, dry_run=True)
        assert (choice.worker_id, choice.basis, choice.why) == ("common1", Basis.COST, "")
    (remark,) = choice.ranking.remarks
    assert remark.startswith(f"the workers' blocks have {shapes + 1} shapes") and remark in choice.explain()
    assert remark in (await client.overlap(asked)).explain()


async def test_what_was_not_read_is_said_and_every_candidate_is_told_if_asked_for(
    store: Store, index: RedisIndex, fleet: FleetStore
) -> None:
    await fleet.write(pool(*(worker(f"w{n:03}", load={"running_decodes": n}) for n in range(COUNT))))
    asked = Prompt.of_tokens(SCOPE, TOKENS)
    choice = await router(index, store).reserve(asked, dry_run=True)
    assert choice.worker_id == "w000"
    assert 0 < choice.ranking.unread < COUNT
    assert f"{choice.ranking.unread} more candidates were not read; none of them costs less" in choice.explain()
    told = await router(index, store, RouterSettings(deadline_ms=None, explain_all=True)).reserve(asked, dry_run=True)
    assert (told.worker_id, len(told.ranking), told.ranking.unread) == ("w000", COUNT, 0)
    assert "not read" not in told.explain()
    assert len(await router(index, store).rank(asked)) == COUNT


async def test_avoided_and_denied_workers_are_not_chosen(store: Store, index: RedisIndex, fleet: FleetStore) -> None:
    await fleet.write(pool(*(worker(f"w{n:03}", load={"running_decodes": n}) for n in range(COUNT))))
    client = router(index, store)
    asked = Prompt.of_tokens(SCOPE, TOKENS, select=Selector(deny=["w001"]))
    choice = await client.reserve(asked, avoid=["w000"])
    assert choice.worker_id == "w002"
    assert choice.ranking.left_out == {"w000": "the caller avoids it", "w001": "it is on the deny list"}
    only = Prompt.of_tokens(SCOPE, TOKENS, select=Selector(allow=["w044", "w055"]))
    assert (await client.reserve(only)).worker_id == "w044"
    with pytest.raises(NoWorkers, match="none of 60 workers"):
        await client.reserve(asked, avoid=[f"w{n:03}" for n in range(COUNT)])


async def test_a_session_keeps_its_worker_among_many(store: Store, index: RedisIndex, fleet: FleetStore) -> None:
    records = pool(*(worker(f"w{n:03}", load={"running_decodes": 1}) for n in range(COUNT)))
    await fleet.write(records)
    client = router(index, store, RouterSettings(deadline_ms=None, session_us=50_000.0))
    for session in map(str, range(12)):
        choice = await client.reserve(Prompt.of_tokens(SCOPE, [7] * 300, session_id=session), dry_run=True)
        assert choice.worker_id == session_worker(session, sorted(records))
        assert "session" not in {term.name for term in choice.result.terms}


async def test_a_worker_that_is_newer_than_the_records_read_is_read_and_used(
    store: Store, index: RedisIndex, fleet: FleetStore
) -> None:
    await fleet.write(pool(*(worker(f"w{n:03}", load={"running_decodes": 5}) for n in range(COUNT))))
    profile = EngineProfile(
        by_worker={"another": EngineRates(prefill_us_per_token=80.0)}
    )  # so kinds change their numbers
    client = router(index, store, RouterSettings(deadline_ms=None, fleet_max_age_ms=600_000, profile=profile))
    assert (await client.reserve(Prompt.of_tokens(SCOPE, TOKENS), dry_run=True)).worker_id.startswith("w")
    await fleet.write(pool(worker("another", load={"running_decodes": 9}), worker("new", load={"running_decodes": 0})))
    choice = await client.reserve(Prompt.of_tokens(SCOPE, TOKENS))
    assert (choice.worker_id, choice.basis) == ("new", Basis.COST)


async def test_workers_that_are_all_of_their_own_kind_are_chosen_by_cost(
    store: Store, index: RedisIndex, fleet: FleetStore
) -> None:
    """Learned rates make them so; they are too many kinds for one call."""
    records = pool(*(worker(f"w{n:03}", load={"running_decodes": COUNT - n}) for n in range(COUNT)))
    await fleet.write(records)
    rates = {id: EngineRates(prefill_us_per_token=40.0 + n / 1_000) for n, id in enumerate(records)}
    client = router(index, store, replace(SETTINGS, profile=EngineProfile(by_worker=rates)))
    choice = await client.reserve(Prompt.of_tokens(SCOPE, TOKENS))
    assert (choice.worker_id, choice.basis, choice.why) == (f"w{COUNT - 1:03}", Basis.COST, "")


async def test_a_search_that_would_take_too_long_is_not_tried_for_each_choice(
    store: Store, index: RedisIndex, fleet: FleetStore
) -> None:
    """All 300 workers miss the SLO, so one call would read each. The next choices use a separate lookup at once."""
    records = pool(*(worker(f"w{n:03}", load={"running_decodes": 1}) for n in range(300)))
    await fleet.write(records)
    client = router(index, store, replace(SETTINGS, limits=LimitSettings(slo=SloMode.FILTER)))
    await store.client.config_resetstat()
    asked = Prompt.of_tokens(SCOPE, TOKENS, slo=Slo(ttft_ms=0.001))
    choices = [await client.reserve(asked) for _ in range(4)]
    assert {(choice.basis, choice.why) for choice in choices} == {(Basis.COST, "")}
    calls = await store.client.info("commandstats")
    assert calls["cmdstat_fcall"]["calls"] <= 6


async def test_workers_that_no_indexer_reported_are_named_instead(store: Store, index: RedisIndex) -> None:
    """An indexer of an older version does not report which workers are alike."""
    records = pool(*(worker(f"w{n:03}", load={"running_decodes": n + 1}) for n in range(COUNT)))
    client = RouterClient(index, StaticFleet(records), SETTINGS, reservations=RedisReservations(store))
    choices = [await client.reserve(Prompt.of_tokens(SCOPE, [n] * 100)) for n in range(4)]
    assert all(choice.basis is Basis.COST and not choice.why for choice in choices)
    assert len({choice.worker_id for choice in choices}) == 4
    assert len(choices[0].ranking) == COUNT


async def test_hundreds_of_choices_at_a_time_are_all_by_cost(
    store: Store, index: RedisIndex, fleet: FleetStore
) -> None:
    """There are more of them than connections."""
    await fleet.write(pool(*(worker(f"w{n:03}", load={"running_decodes": 1}) for n in range(COUNT))))
    prompts = [Prompt.of_tokens(SCOPE, [n] * 100) for n in range(300)]
    opened = RouterClient.open(store.url, RouterSettings(deadline_ms=None), wait=False)
    async with opened as client, AsyncExitStack() as stack:
        choices = await asyncio.gather(*(stack.enter_async_context(client.route(prompt)) for prompt in prompts))
        assert {choice.basis for choice in choices} == {Basis.COST}
        assert not any(choice.why for choice in choices)
    assert await store.client.hlen(pool_keys(SCOPE.pool_id)[2]) == 0


async def test_an_index_that_cannot_be_read_costs_no_bookings(
    store: Store, index: RedisIndex, fleet: FleetStore
) -> None:
    await fleet.write(pool(*(worker(f"w{n:03}", load={"running_decodes": 1}) for n in range(COUNT))))
    client, asked = router(index, store), Prompt.of_tokens(SCOPE, TOKENS)
    assert (await client.reserve(asked)).basis is Basis.COST
    await store.client.set(index.shard_keys[0].blocks(SCOPE.scope_id), "not a hash")
    choices = [await client.reserve(asked) for _ in range(3)]
    assert {choice.basis for choice in choices} == {Basis.LOAD}
    assert await store.client.hlen(pool_keys(SCOPE.pool_id)[2]) == 4
