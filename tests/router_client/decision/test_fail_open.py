"""Choosing while the index or the whole store is slow or away; the kill switch; shadow mode."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

import pytest

from kvatlas.blocks.residency import Overlap
from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, EngineRates
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.errors import Unreachable
from kvatlas.fleet.records import EngineEndpoint, FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.request import Slo
from kvatlas.reservations import Ask, Booking, Evaluation, MemoryReservations
from kvatlas.store.circuit_breaker import CircuitBreaker
from kvatlas.store.connection import connected_store
from kvatlas.store.deadline import Deadline, LateCalls
from router_client import (
    Basis,
    BookingSettings,
    NoWorkers,
    Prompt,
    RoundRobin,
    RouterClient,
    RouterSettings,
    StaticFleet,
)
from router_client.settings import LimitSettings, SloMode
from tests.eventually import until
from tests.router_client.pools import FETCH_BY, PEER, SCOPE, hold, pool, worker

pytestmark = pytest.mark.anyio

TOKENS = list(range(1_000))
PROMPT = Prompt.of_tokens(SCOPE, TOKENS)
WORKERS = pool(*(worker(id) for id in ("a", "b", "c", "d")))
HOLDER = "c"
NOW_US = 1_700_000_000_000_000


class BreakableIndex:
    """An index that hangs or fails on demand."""

    def __init__(self) -> None:
        self.index = MemoryIndex()
        self.broken: str | None = None
        self.asked = 0

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        self.asked += 1
        if self.broken == "slow":
            await asyncio.Event().wait()
        if self.broken == "away":
            raise Unreachable("Redis at redis://127.0.0.1:1: connection refused")
        return await self.index.overlap(scope, hashes, first_index=first_index, limit=limit, verify=verify)


class BreakableFleet(StaticFleet):
    broken = False

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        if self.broken:
            raise Unreachable("Redis at redis://127.0.0.1:1: connection refused")
        return await super().pool(pool_id)


@pytest.fixture
async def index() -> BreakableIndex:
    index = BreakableIndex()
    await hold(index.index, WORKERS[HOLDER], TOKENS)
    return index


# ---------------------------------------------------------------- the index


@pytest.mark.parametrize(
    ("how", "why"), [("slow", "index: no answer in 5 ms"), ("away", "index: Redis at redis://127.0.0.1:1")]
)
async def test_without_the_index_load_decides_and_the_choice_says_so(index: BreakableIndex, how: str, why: str) -> None:
    loads = {id: {"running_decodes": running} for id, running in zip("abcd", (4, 0, 2, 9), strict=True)}
    fleet = StaticFleet(pool(*(worker(id, load=load) for id, load in loads.items())))
    router = RouterClient(index, fleet, RouterSettings(deadline_ms=5, most_deadline_ms=5))
    assert (await router.reserve(PROMPT, dry_run=True)).worker_id == HOLDER
    index.broken = how
    choice = await router.reserve(PROMPT, dry_run=True)
    assert (choice.worker_id, choice.basis, choice.mode) == ("b", Basis.LOAD, "load")
    assert why in choice.why and why in choice.explain()
    assert (router.counters.by_load, router.counters.index_failures) == (1, 1)


async def test_a_failing_index_is_called_rarely_and_used_again_when_it_recovers(index: BreakableIndex) -> None:
    router = RouterClient(index, StaticFleet(WORKERS))
    index.broken = "away"
    for _ in range(50):
        async with router.route(PROMPT) as choice:
            assert choice.basis is Basis.LOAD
    assert index.asked < 10
    index.broken = None

    async def recovered() -> bool:
        return (await router.reserve(PROMPT, dry_run=True)).basis is Basis.COST

    await until(recovered, what="the index is called again")
    assert (await router.reserve(PROMPT, dry_run=True)).worker_id == HOLDER


async def test_choices_without_the_index_are_booked_too(index: BreakableIndex) -> None:
    router = RouterClient(index, StaticFleet(WORKERS))
    index.broken = "away"
    chosen = [(await router.reserve(Prompt.of_tokens(SCOPE, [n] * 100))).worker_id for n in range(8)]
    assert sorted(chosen) == [*"aabbccdd"]


async def test_with_the_kill_switch_the_index_is_not_called(index: BreakableIndex) -> None:
    router = RouterClient(index, StaticFleet(WORKERS), RouterSettings(load_only=True))
    chosen = {(await router.reserve(Prompt.of_tokens(SCOPE, [n] * 100), dry_run=True)).worker_id for n in range(40)}
    assert len(chosen) == 4
    assert index.asked == 0
    router.load_only = False
    assert (await router.reserve(PROMPT, dry_run=True)).worker_id == HOLDER
    router.load_only = True
    choice = await router.reserve(PROMPT, dry_run=True)
    assert (choice.basis, index.asked) == (Basis.LOAD, 1)
    assert "set to choose by load only" in choice.explain()


async def test_a_fleet_that_can_not_be_read_is_used_as_last_known(index: BreakableIndex) -> None:
    fleet = BreakableFleet(WORKERS)
    router = RouterClient(index, fleet, RouterSettings(fleet_max_age_ms=0))
    fleet.broken = True
    with pytest.raises(Unreachable):
        await router.reserve(PROMPT, dry_run=True)
    fleet.broken = False
    await router.reserve(PROMPT, dry_run=True)
    fleet.broken = True
    choice = await router.reserve(PROMPT, dry_run=True)
    assert (choice.worker_id, choice.basis, router.counters.open_fleet) == (HOLDER, Basis.COST, 1)
    assert "fleet: " in choice.explain()


# ---------------------------------------------------------------- the whole store


@pytest.fixture
async def server() -> AsyncIterator[ValkeyProcess]:
    """A store for one test, with a fleet and an index."""
    with ValkeyProcess() as server:
        async with connected_store(server.url, wait=False) as store:
            index = await open_redis_index(store, writer=True)
            await FleetStore(store).write(WORKERS)
            await hold(index, WORKERS[HOLDER], TOKENS)
        yield server


async def test_a_store_that_hangs_delays_no_choice(server: ValkeyProcess) -> None:
    async with RouterClient.open(server.url, RouterSettings(deadline_ms=20), wait=False) as router:

        async def by_cost() -> bool:
            async with router.route(PROMPT) as choice:
                return choice.basis is Basis.COST and not choice.why and choice.worker_id == HOLDER

        await until(by_cost, what="a choice by cost")
        server.pause()
        try:
            choices = [await router.reserve(Prompt.of_tokens(SCOPE, [n] * 100)) for n in range(8)]
        finally:
            server.resume()
        assert all(choice.basis is not Basis.COST and choice.why for choice in choices)
        assert {choice.worker_id for choice in choices} <= set(WORKERS)
        for choice in choices:
            await choice.first_token()
            await choice.done()
        await until(by_cost, what="a choice by cost again")
        assert router.counters.index_failures > 0 and router.counters.booking_failures > 0

        async with connected_store(server.url, wait=False) as reader:

            async def nothing_booked() -> bool:
                key = f"kva:{{pool:{SCOPE.pool_id}}}:booked.2"
                return int(await reader.client.zcard(key)) == 0

            await until(nothing_booked, what="bookings made in spite of the time-out are cancelled")


async def test_without_a_store_the_hash_of_the_prefix_decides(server: ValkeyProcess) -> None:
    async with RouterClient.open(server.url, RouterSettings(deadline_ms=None), wait=False) as router:
        assert (await router.reserve(PROMPT, dry_run=True)).worker_id == HOLDER
        server.kill()
        chosen = [await router.reserve(Prompt.of_tokens(SCOPE, [n] * 100)) for n in range(40)]
        assert {choice.basis for choice in chosen} == {Basis.PREFIX_HASH}
        again = [await router.reserve(Prompt.of_tokens(SCOPE, [n] * 100)) for n in range(40)]
        assert [choice.worker_id for choice in chosen] == [choice.worker_id for choice in again]
        assert len({choice.worker_id for choice in chosen}) == 4
        followed_up = await router.reserve(Prompt.of_tokens(SCOPE, [*range(2_000), 1, 2, 3]))
        assert followed_up.worker_id == (await router.reserve(Prompt.of_tokens(SCOPE, range(1_500)))).worker_id
        assert "chosen by prefix hash" in chosen[0].explain()
        with pytest.raises(Unreachable, match=str(server.port)):
            await router.overlap(PROMPT)


class UnreachableReservations(MemoryReservations):
    """A store that never answers."""

    async def evaluate(self, pool_id: str, ask: Ask) -> Evaluation:
        raise Unreachable("Redis at redis://127.0.0.1:1: connection refused")

    async def book(self, pool_id: str, booking: Booking) -> Evaluation | None:
        raise Unreachable("Redis at redis://127.0.0.1:1: connection refused")


MANY = 80


def far_apart(rng: random.Random) -> Mapping[str, FleetRecord]:
    """Workers of two block sizes and three makes of load: known, unknown, and full."""
    records = []
    for number in range(MANY):
        load = {
            "running_decodes": rng.randrange(25),
            "queued_prefill_tokens": rng.randrange(4_000),
            "forward_pass": {
                "total_request_slots": 24,
                "active_kv_blocks": rng.randrange(900),
                "total_kv_blocks": 1_000,
            },
            "sampled_us": NOW_US,
        }
        size = 32 if number % 9 == 4 else 16
        records.append(worker(f"w{number:03}", block_size=size, load=None if number % 11 == 7 else load))
    return pool(*records)


@pytest.mark.parametrize("seed", range(6))
async def test_alone_the_cheapest_of_many_is_chosen_and_few_are_priced(seed: int) -> None:
    """Held against a router that prices every candidate, while bookings and predictions grow."""
    rng, index = random.Random(seed), MemoryIndex()
    records = far_apart(rng)
    for id in rng.sample(sorted(records), MANY if seed % 2 else 8):
        tier = Tier.CPU_DRAM if seed == 4 and id[-1] == "3" else Tier.HBM
        await hold(index, records[id], TOKENS, blocks=rng.randrange(1, 30), tier=tier)
    slow = EngineRates(prefill_us_per_token=80.0, tpot_base_us=14_000.0)
    profile = EngineProfile(by_worker={id: slow for id in records if seed == 2 and id[-1] in "147"})
    limits = LimitSettings(slo=rng.choice(list(SloMode)))
    settings = RouterSettings(profile=profile, limits=limits, session_us=50_000.0)
    few, every = (
        RouterClient(
            index,
            StaticFleet(records),
            replace(settings, explain_all=explain_all),
            reservations=UnreachableReservations(),
            now_us=lambda: NOW_US,
        )
        for explain_all in (False, True)
    )
    fewest = MANY
    for number in range(60):
        tokens = [*TOKENS[: rng.choice([100, 500, 1_000])], *range(number % 5 * 50)]
        session, slo = rng.choice([None, None, "s"]), Slo(ttft_ms=rng.choice([1, 50, 1_000]))
        asked = Prompt.of_tokens(SCOPE, tokens, output_tokens=rng.choice([1, 128]), session_id=session, slo=slo)
        avoid = rng.sample(sorted(records), number % 3)
        expected = await every.reserve(asked, avoid=avoid, dry_run=True)
        choice = await few.reserve(asked, avoid=avoid)
        assert choice.basis is expected.basis and choice.why.startswith("reservations: ")
        cheapest = [one for one in expected.ranking if one.score_us <= expected.score_us + 1]
        assert choice.worker_id in {one.worker_id for one in cheapest}, (choice.explain(), expected.explain())
        assert choice.result.over == expected.result.over and abs(choice.score_us - expected.score_us) <= 1
        assert len(choice.ranking) + choice.ranking.unread == len(expected.ranking)
        fewest = min(fewest, len(choice.ranking))
        same = await every.reserve(asked, avoid=sorted(records.keys() - {choice.worker_id}))
        assert same.worker_id == choice.worker_id
        if rng.random() < 0.5:
            for each in (choice, same):
                await each.first_token()
    assert fewest < MANY / 2


async def test_alone_a_worker_that_has_left_is_not_chosen() -> None:
    records = dict(far_apart(random.Random(1)))
    fleet = StaticFleet(records)
    settings = RouterSettings(fleet_max_age_ms=0)
    router = RouterClient(MemoryIndex(), fleet, settings, reservations=UnreachableReservations(), now_us=lambda: NOW_US)
    for _ in range(30):
        left = (await router.reserve(PROMPT, dry_run=True)).worker_id
        del fleet.records[left]
        assert left not in await router.workers(SCOPE)
        choice = await router.reserve(PROMPT, dry_run=True)
        assert choice.worker_id in fleet.records and len(choice.ranking) < MANY / 2


# ---------------------------------------------------------------- shadow mode


class Always:
    """A policy that always chooses one worker."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id

    def choose(self, prompt: Prompt, workers: Sequence[EngineEndpoint]) -> str:
        return self.worker_id


async def test_shadow_mode_follows_another_policy_and_records_what_cost_would_choose(index: BreakableIndex) -> None:
    router = RouterClient(index, StaticFleet(WORKERS), RouterSettings(follow=RoundRobin(), deadline_ms=None))
    choices = [await router.reserve(PROMPT) for _ in range(4)]
    assert [choice.worker_id for choice in choices] == [*"abcd"]
    assert {choice.basis for choice in choices} == {Basis.POLICY}
    assert choices[0].would_be == HOLDER and f"cost would choose {HOLDER}" in choices[0].explain()
    assert choices[0].result.worker_id == "a"
    counters = router.counters
    assert (counters.followed, counters.agreed) == (4, sum(c.would_be == c.worker_id for c in choices))
    # bookings are on the workers to which requests really go
    assert [r.cost.amounts[4] for r in await router.rank(Prompt.of_tokens(SCOPE, [5]))] == [2, 2, 2, 2]


@pytest.mark.parametrize("reservations", [MemoryReservations, UnreachableReservations])
async def test_a_followed_worker_fetches_from_the_source_that_its_booking_chose(
    index: BreakableIndex, reservations: type[MemoryReservations]
) -> None:
    workers = pool(*(worker(id, **PEER) for id in ("one", "other", "reader")))
    for source in ("one", "other"):
        await hold(index.index, workers[source], TOKENS)
    settings = RouterSettings(follow=Always("reader"), deadline_ms=None)
    fleet, booked = StaticFleet(workers), reservations(lambda: NOW_US)
    router = RouterClient(index, fleet, settings, reservations=booked, now_us=lambda: NOW_US)
    prompt = replace(PROMPT, fetch_by=FETCH_BY)
    choices = [await router.reserve(prompt) for _ in range(4)]
    assert {choice.worker_id for choice in choices} == {"reader"}
    sources = [choice.result.source for choice in choices]
    assert set(sources[:2]) == {"one", "other"} and sources[2:] == sources[:2]


async def test_a_policy_that_chooses_no_candidate_is_not_followed(index: BreakableIndex) -> None:
    router = RouterClient(index, StaticFleet(WORKERS), RouterSettings(follow=Always("gone"), deadline_ms=None))
    choice = await router.reserve(PROMPT)
    assert (choice.worker_id, choice.basis, choice.would_be) == (HOLDER, Basis.COST, None)
    empty = RouterClient(index, StaticFleet({}), RouterSettings(follow=RoundRobin()))
    with pytest.raises(NoWorkers):
        await empty.reserve(PROMPT)


async def test_without_reservations_only_reported_load_counts(index: BreakableIndex) -> None:
    settings = RouterSettings(booking=BookingSettings(reservations=False))
    router = RouterClient(index, StaticFleet(WORKERS), settings)
    choices = [await router.reserve(PROMPT) for _ in range(4)]
    assert {choice.worker_id for choice in choices} == {HOLDER}
    assert choices[0] == await router.reserve(PROMPT, dry_run=True)
    assert choices[0].reservation is None


# ---------------------------------------------------------------- the breaker


async def test_a_deadline_counts_waiting_and_not_what_the_router_computes() -> None:
    now_s = 0.0
    deadline = Deadline(10.0, LateCalls(), clock=lambda: now_s)

    async def answer(waiting_s: float) -> str:
        nonlocal now_s
        for _ in range(20):  # it takes some turns of the loop
            await asyncio.sleep(0)
        now_s += waiting_s
        return "answer"

    assert await deadline.wait_for(answer(0.004)) == "answer"
    now_s += 60.0  # such as the time to price a thousand workers
    assert await deadline.wait_for(answer(0.007)) == "answer"
    with pytest.raises(TimeoutError):  # 11 ms of 10 have passed
        await deadline.wait_for(answer(0.0))


def test_the_circuit_breaker_rests_after_failures_and_then_allows_one_call_at_a_time() -> None:
    now = [0.0]
    breaker = CircuitBreaker(failures=2, rest_s=1.0, clock=lambda: now[0])
    breaker.record_failure()
    assert breaker.may_call()
    breaker.record_failure()
    assert not breaker.may_call()
    now[0] = 1.0
    assert breaker.may_call() and not breaker.may_call()
    breaker.record_failure()
    now[0] = 1.9
    assert not breaker.may_call()
    now[0] = 2.0
    assert breaker.may_call()
    breaker.record_success()
    assert breaker.may_call() and breaker.may_call()
