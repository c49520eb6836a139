"""From short and long answers, on quiet and busy fleets, routers learn the engines' rates, and equal ones of equal engines."""

import pytest

from kvatlas.index.memory.index import MemoryIndex
from kvatlas_simulator.engine.step_cost import StepCost
from router_client import LearningSettings, RouterClient, RouterSettings
from tests.eventually import until
from tests.router_client.pools import SCOPE
from tests.router_client.simulated_fleet import SimulatedFleet

pytestmark = pytest.mark.anyio

TRUE = StepCost(45.0, 8_000.0, 50.0, 0.02, 55.0)
SETTINGS = RouterSettings(deadline_ms=None, fleet_max_age_ms=0, learning=LearningSettings(every_s=0.02))
QUIET, BUSY = 0.4, 6.0
"""Requests a second for two engines: at most one is open almost always, or several in each."""
TURNS, REQUESTS = 5, 60


@pytest.mark.parametrize("a_second", [QUIET, BUSY])
@pytest.mark.parametrize(
    ("answers", "tokens_a_part", "usage_late_us"),
    [
        ((1, 1), 1, 0.0),
        ((1, 4), 1, 0.0),
        ((20, 200), 1, 0.0),
        ((400, 1_000), 1, 0.0),
        ((1, 1_000), 1, 0.0),
        ((20, 1_000), 4, 0.0),
        ((20, 200), 1, 2_000_000.0),
    ],
    ids=["one token", "few tokens", "usual", "long", "mixed", "speculative", "late usage"],
)
async def test_equal_engines_stay_equal_and_their_rates_are_learned(
    answers: tuple[int, int], tokens_a_part: int, usage_late_us: float, a_second: float
) -> None:
    fleet = SimulatedFleet(
        {"a": TRUE, "b": TRUE}, answers=answers, tokens_a_part=tokens_a_part, usage_late_us=usage_late_us
    )
    router = RouterClient(MemoryIndex(), fleet.fleet, SETTINGS, now_us=fleet.clock_us)
    async with router:
        for _ in range(TURNS):
            fleet.served = dict.fromkeys(fleet.served, 0)
            await fleet.serve(router, REQUESTS, a_second)
            await until(
                lambda: router.counters.learned + router.counters.said_nothing == router.counters.routed,
                what="all are examined",
            )
        rates = [found.rates for found in router.rates(SCOPE).values()]
    assert min(fleet.served.values()) > 0.25 * REQUESTS, fleet.served
    assert len(rates) == len(fleet.costs)
    for found in rates:
        assert found.prefill_us(2_048, 0) == pytest.approx(2_048 * TRUE.prefill_us_per_token, rel=0.15)
    if answers[1] < 10:
        return  # too short to time: its tokens' rates stay as configured
    running = 1 if a_second == QUIET else 4
    kv_tokens = 2_000 * running
    step_us = TRUE.step_us(prefill_tokens=0, decode_sequences=running, decode_kv_tokens=kv_tokens, swapped_in=0)
    for found in rates:
        assert found.tpot_us(running, kv_tokens) == pytest.approx(step_us / tokens_a_part, rel=0.15)
