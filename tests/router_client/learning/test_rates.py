"""Routers learn together how fast workers are, and price accordingly."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvatlas.cost import EngineRates, Load
from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.reservations import LoadReport, MemoryReservations, RedisReservations, Reservations, WorkerReport
from kvatlas.store.connection import Store, connected_store
from kvatlas_simulator.engine.step_cost import StepCost
from router_client import (
    Choice,
    CostProfile,
    EngineProfile,
    LearningSettings,
    Prompt,
    QuillcacheProfile,
    RoundRobin,
    RouterClient,
    RouterSettings,
    StaticFleet,
    Timings,
    Usage,
)
from router_client.learning.rates import MOST_A_WORKER
from tests.eventually import until
from tests.router_client.pools import SCOPE, pool, worker
from tests.router_client.simulated_fleet import SimulatedFleet

pytestmark = pytest.mark.anyio

LEARNING = LearningSettings(every_s=0.02)
SETTINGS = RouterSettings(deadline_ms=None, fleet_max_age_ms=0, learning=LEARNING)
SLOW = Timings(ttft_us=100 * 1_000 + 5_000, tpot_us=30_000)
"""The timings of an answer from a worker that is less than half as fast as usual."""
PROMPT_TOKENS = 1_000


@pytest.fixture(params=["memory", "redis"])
async def reservations(request: pytest.FixtureRequest, store: Store) -> Reservations:
    """Reservations of two idle workers."""
    made = MemoryReservations() if request.param == "memory" else RedisReservations(store)
    await report(made)
    return made


async def report(reservations: Reservations) -> None:
    """Report the workers' loads, as the indexer does every second."""
    await reservations.report(SCOPE.pool_id, {id: WorkerReport(0, LoadReport(Load())) for id in ("a", "b")})


def router_over(reservations: Reservations, settings: RouterSettings = SETTINGS) -> RouterClient:
    """A router over two workers that report their load."""
    fleet = StaticFleet(pool(*(worker(id, load={}) for id in ("a", "b"))))
    return RouterClient(MemoryIndex(), fleet, settings, reservations=reservations)


def prompt(number: int) -> Prompt:
    return Prompt.of_tokens(SCOPE, [number] * PROMPT_TOKENS)


async def slow_answer(router: RouterClient, number: int, *, avoid: str = "b") -> Choice:
    """Send a request to a slow worker."""
    async with router.route(prompt(number), avoid=[avoid]) as choice:
        await choice.first_token()
        await choice.done(usage=Usage(PROMPT_TOKENS, 10, 0), timings=SLOW)
    return choice


async def learned_from(router: RouterClient, requests: int) -> LearnedRates:
    """The rates of worker `a`, once they are learned from this many requests."""

    def rates() -> LearnedRates | None:
        found = router.rates(SCOPE).get("a")
        return found if found is not None and found.requests == requests else None

    await until(lambda: rates() is not None, what=f"{requests} requests are learned from")
    return router.rates(SCOPE)["a"]


async def ttft_us(router: RouterClient, worker_id: str) -> int:
    found = {result.worker_id: result.cost.ttft_us for result in await router.rank(prompt(999))}
    return found[worker_id] or 0


@asynccontextmanager
async def entered(*routers: RouterClient) -> AsyncIterator[None]:
    for router in routers:
        await router.__aenter__()
    try:
        yield
    finally:
        for router in routers:
            await router.__aexit__(None, None, None)


def examined(router: RouterClient) -> int:
    return router.counters.learned + router.counters.said_nothing


def furthest_off(found: EngineRates, true: StepCost) -> float:
    """The largest relative error of the predicted times of usual requests."""
    times = [found.prefill_us(new, 0) / (true.prefill_us_per_token * new) for new in (512, 2_048)]
    for running, kv_tokens in ((1, 2_000), (4, 8_000)):
        expected = found.tpot_base_us + found.tpot_us_per_running * running + found.tpot_us_per_kv_token * kv_tokens
        took = true.step_us(prefill_tokens=0, decode_sequences=running, decode_kv_tokens=kv_tokens, swapped_in=0)
        times.append(expected / took)
    return max(abs(one - 1) for one in times)


async def test_rates_of_simulated_engines_are_within_10_percent_after_200_requests_each() -> None:
    """Even if other requests' prefills come in between, some requests wait, and 5 % of the measurements are nonsense."""
    true = {"fast": StepCost(20.0, 4_000.0, 50.0, 0.02, 55.0), "slow": StepCost(120.0, 16_000.0, 100.0, 0.04, 55.0)}
    fleet = SimulatedFleet(true, broken=0.05)
    settings = replace(SETTINGS, follow=RoundRobin())
    router = RouterClient(MemoryIndex(), fleet.fleet, settings, now_us=fleet.clock_us)
    async with router:
        for _ in range(4):  # a router learns from up to 64 of a worker's requests in one turn
            await fleet.serve(router, 100, a_second=5)
            await until(lambda: examined(router) == router.counters.routed, what="all are examined")
        rates = router.rates(SCOPE)
    assert {id: found.requests > 180 for id, found in rates.items()} == dict.fromkeys(true, True)
    assert {id: furthest_off(rates[id].rates, cost) < 0.1 for id, cost in true.items()} == dict.fromkeys(true, True)


async def test_learned_rates_price_the_next_choice(reservations: Reservations) -> None:
    router = router_over(reservations)
    async with router:
        before = await ttft_us(router, "a")
        for number in range(8):
            await slow_answer(router, number)
        rates = (await learned_from(router, 8)).rates
        assert 60 < rates.prefill_us_per_token < 110
        assert rates.tpot_base_us > 3 * EngineRates().tpot_base_us
        assert await ttft_us(router, "a") == round(rates.prefill_us(PROMPT_TOKENS, 0)) > 2 * before
        assert await ttft_us(router, "b") == await ttft_us(router, "a")  # nothing is known about it: it shares traffic
        assert {(await router.reserve(prompt(number), dry_run=True)).worker_id for number in range(20, 40)} == {
            "a",
            "b",
        }


async def test_routers_learn_together_and_a_new_one_starts_with_it(reservations: Reservations) -> None:
    first, second = router_over(reservations), router_over(reservations)
    async with entered(first, second):
        for number in range(10):
            await slow_answer((first, second)[number % 2], number)
        one, other = await learned_from(first, 10), await learned_from(second, 10)
        assert one.rates.prefill_us_per_token == pytest.approx(other.rates.prefill_us_per_token, rel=0.05)
        later = router_over(reservations)  # not even entered
        assert await ttft_us(later, "a") == pytest.approx(one.rates.prefill_us(PROMPT_TOKENS, 0), rel=0.05)
        assert later.rates(SCOPE)["a"].requests == 10


async def test_leaving_shares_the_last_evidence(reservations: Reservations) -> None:
    settings = replace(SETTINGS, learning=LearningSettings(every_s=3_600))
    async with router_over(reservations, settings) as router:
        await slow_answer(router, 1)
        assert router.rates(SCOPE) == {}
    assert (await reservations.read_evidence(SCOPE.pool_id))["a"].requests == 1


async def test_a_worker_that_is_gone_is_forgotten(reservations: Reservations) -> None:
    async with router_over(reservations) as router:
        await slow_answer(router, 1)
        await slow_answer(router, 2, avoid="a")
        await until(lambda: len(router.rates(SCOPE)) == 2, what="both are known")
        await reservations.forget(SCOPE.pool_id, "a")
        await until(lambda: list(router.rates(SCOPE)) == ["b"], what="a is forgotten")


@pytest.mark.parametrize(
    ("profile", "on"), [(EngineProfile(), False), (QuillcacheProfile(), True)], ids=["off", "fixed coefficients"]
)
async def test_nothing_is_learned_if_it_is_switched_off_or_prices_are_fixed(
    reservations: Reservations, profile: CostProfile, on: bool
) -> None:
    settings = replace(SETTINGS, profile=profile, learning=replace(LEARNING, on=on))
    async with router_over(reservations, settings) as router:
        choice = await slow_answer(router, 1)
        assert choice.feedback is None
    assert await reservations.read_evidence(SCOPE.pool_id) == {}


async def test_only_measured_requests_are_learned_from_and_only_once() -> None:
    reservations = MemoryReservations()
    router = router_over(reservations)
    async with router:
        async with router.route(prompt(1)) as choice:
            await choice.done()
        async with router.route(prompt(2)) as choice:
            await choice.done(usage=Usage(PROMPT_TOKENS, 10, 0))
        async with router.route(prompt(3)) as choice:
            for _ in range(2):
                await choice.done(usage=Usage(PROMPT_TOKENS, 10, 0), timings=Timings())
        choice = await slow_answer(router, 4)
        await choice.done(usage=Usage(PROMPT_TOKENS, 10, 0), timings=SLOW)
        await learned_from(router, 1)
        assert (router.counters.learned, router.counters.said_nothing) == (1, 1)


async def test_a_turn_learns_from_a_bounded_number_of_each_workers_requests() -> None:
    settings = replace(SETTINGS, learning=LearningSettings(every_s=600.0))
    async with router_over(reservations := MemoryReservations(), settings) as router:
        await report(reservations)
        for number in range(MOST_A_WORKER + 3):
            await slow_answer(router, number)
        await slow_answer(router, 0, avoid="a")
    assert examined(router) == MOST_A_WORKER + 1


async def test_nothing_is_learned_from_a_worker_whose_load_is_unknown() -> None:
    fleet = StaticFleet(pool(worker("a")))
    async with RouterClient(MemoryIndex(), fleet, SETTINGS) as router:
        await slow_answer(router, 1)
        await until(lambda: router.counters.said_nothing == 1, what="it is examined")
        assert router.rates(SCOPE) == {}


async def test_one_slow_first_answer_does_not_drive_requests_away() -> None:
    async with router_over(MemoryReservations()) as router:
        usual = await ttft_us(router, "a")
        async with router.route(prompt(1), avoid=["b"]) as choice:
            await choice.done(usage=Usage(PROMPT_TOKENS, 10, 0), timings=Timings(ttft_us=50.0 * usual))
        await learned_from(router, 1)
        assert await ttft_us(router, "a") < 2 * usual


async def test_evidence_that_was_not_shared_is_shared_later() -> None:
    with ValkeyProcess() as server:
        async with connected_store(server.url, wait=False) as opened:
            settings = replace(SETTINGS, deadline_ms=50)
            async with router_over(reservations := RedisReservations(opened), settings) as router:
                await report(reservations)
                await slow_answer(router, 1)
                await learned_from(router, 1)
                choice = await router.reserve(prompt(2), avoid=["b"])
                server.pause()
                await choice.done(usage=Usage(PROMPT_TOKENS, 10, 0), timings=SLOW)
                await until(lambda: router.counters.learned == 2, what="it is examined")
                server.resume()
                # 3 if the call that timed out was applied all the same
                await until(lambda: router.rates(SCOPE)["a"].requests in (2, 3), what="it is shared")
