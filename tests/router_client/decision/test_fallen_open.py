"""Choices that failed open: how long they waited for the store, and how they are counted and explained."""

from collections.abc import Mapping

import pytest

from kvatlas.cost.regression import Evidence
from kvatlas.errors import Unreachable
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.reservations import Booking, Evaluation, MemoryReservations
from kvatlas.store.deadline import CALLS_A_DECISION, StoreLatency
from router_client import LearningSettings, NoWorkers, Prompt, RouterClient, RouterSettings, StaticFleet
from router_client.results import fell_open_for_want_of
from tests.eventually import until
from tests.router_client.decision.test_fail_open import BreakableFleet, BreakableIndex
from tests.router_client.pools import SCOPE, pool, worker

pytestmark = pytest.mark.anyio

PROMPT = Prompt.of_tokens(SCOPE, list(range(100)))
WORKERS = pool(worker("a"), worker("b"))
LEAST_MS, MOST_MS = 10.0, 100.0


class BreakableReservations(MemoryReservations):
    broken: str | None = None

    async def book(self, pool_id: str, booking: Booking) -> Evaluation | None:
        if self.broken is not None:
            raise Unreachable(self.broken)
        return await super().book(pool_id, booking)


def test_the_deadline_follows_the_stores_latency_within_bounds() -> None:
    latency = StoreLatency()
    assert latency.deadline_ms(LEAST_MS, MOST_MS) == LEAST_MS
    for _ in range(50):
        latency.record(0.0005)
    assert latency.deadline_ms(LEAST_MS, MOST_MS) == LEAST_MS
    for _ in range(50):
        latency.record(0.02)  # a busy machine
    assert latency.deadline_ms(LEAST_MS, MOST_MS) == pytest.approx(CALLS_A_DECISION * 20, rel=0.05)
    for _ in range(50):
        latency.record(1.0)
    assert latency.deadline_ms(LEAST_MS, MOST_MS) == MOST_MS
    assert latency.deadline_ms(200.0, MOST_MS) == 200.0


@pytest.mark.parametrize("cause", ["index", "fleet", "booking", "connections"])
async def test_each_choice_that_fell_open_is_counted_and_named_by_its_cause(
    cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    index, fleet, reservations = BreakableIndex(), BreakableFleet(WORKERS), BreakableReservations(lambda: 1_000_000)
    settings = RouterSettings(deadline_ms=5_000, most_deadline_ms=5_000, fleet_max_age_ms=0)
    router = RouterClient(index, fleet, settings, reservations=reservations)
    assert fell_open_for_want_of(await router.reserve(PROMPT)) is None
    match cause:
        case "index":
            index.broken = "away"
        case "fleet":
            fleet.broken = True
        case "booking":
            reservations.broken = "Redis at redis://127.0.0.1:1: connection refused"
        case _:
            reservations.broken = "Redis at redis://127.0.0.1:1: Too many connections"
    for _ in range(3):
        assert fell_open_for_want_of(await router.reserve(PROMPT)) == cause
    counted = {name: getattr(router.counters, f"open_{name}") for name in ("index", "fleet", "booking", "connections")}
    assert counted == dict.fromkeys(counted, 0) | {cause: 3}
    (line,) = [message for message in caplog.messages if "without the store" in message]
    assert ("reservations" if cause in ("booking", "connections") else cause) in line


async def test_models_that_nobody_serves_are_not_read_again_and_again() -> None:
    read: list[str] = []

    class Counting(MemoryReservations):
        async def read_evidence(self, pool_id: str) -> Mapping[str, Evidence]:
            read.append(pool_id)
            return await super().read_evidence(pool_id)

    settings = RouterSettings(learning=LearningSettings(every_s=0.005))
    booked = Counting(lambda: 1_000_000)
    async with RouterClient(MemoryIndex(), StaticFleet(WORKERS), settings, reservations=booked) as router:
        for number in range(50):
            with pytest.raises(NoWorkers):
                await router.reserve(Prompt.of_tokens(Scope(f"model-{number}", "t"), [1, 2, 3]))
        await router.reserve(PROMPT)
        await until(lambda: read.count(SCOPE.pool_id) >= 5, what="rates are read a few times")
    assert set(read) == {SCOPE.pool_id}
