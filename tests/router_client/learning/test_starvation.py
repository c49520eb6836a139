"""Wrong evidence does not last: whatever was learned about equal workers, they share the traffic again after a while."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.cost import EngineProfile, EngineRates, Plan
from kvatlas.cost.learned_rates import FinishedRequest
from kvatlas.cost.regression import Evidence
from router_client.learning.rates import PoolRates, Starvation

pytestmark = pytest.mark.anyio

TRUE = EngineRates()
OUTPUT = 100
EXCHANGE = 10
"""Number of requests between two exchanges with the store."""


@dataclass
class LearningPool:
    """Workers, a router that sends each request to the cheapest one, and the evidence in the store."""

    workers: dict[str, EngineRates]
    random: Random
    rates: PoolRates = field(default_factory=lambda: PoolRates(EngineProfile()))
    stored: dict[str, Evidence] = field(default_factory=dict)
    served: int = 0

    async def serve(self, requests: int) -> dict[str, float]:
        """Serve this many requests. Returns each worker's share."""
        counts = dict.fromkeys(self.workers, 0)
        for _ in range(requests):
            costs = {id: self.rates.profile.price(Plan(id, 1_000, OUTPUT)).score_us for id in self.workers}
            cheapest = self.random.choice([id for id, cost in costs.items() if cost == min(costs.values())])
            counts[cheapest] += 1
            await self.answer(cheapest)
        return {id: count / requests for id, count in counts.items()}

    async def answer(self, worker_id: str, *, ttft: float = 1.0, tpot: float = 1.0) -> None:
        """Answer one request. `ttft` and `tpot`: factors by which its measurements are wrong."""
        true, prompt = self.workers[worker_id], round(2 ** self.random.uniform(7, 12))
        ttft_us = (5_000 + true.prefill_us(prompt, 0)) * self.random.lognormvariate(0, 0.05) * ttft
        tpot_us = true.tpot_us(1, prompt + OUTPUT // 2) * self.random.lognormvariate(0, 0.05) * tpot
        plan = Plan(worker_id, prompt, OUTPUT)
        self.rates.add(FinishedRequest(plan, prompt, OUTPUT, 0, ttft_us=ttft_us, tpot_us=tpot_us))
        self.served += 1
        if self.served % EXCHANGE == 0:
            for id, newer in self.rates.take_unshared().items():
                both = self.stored.get(id, Evidence()).followed_by(newer)
                self.stored[id] = Evidence(both.requests, sums=both.sums)
            await self.rates.update(dict(self.stored))


poisons = st.sampled_from([1 / 80, 1 / 10, 1 / 2, 1.0, 2.0, 10.0])


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(poisons, poisons), min_size=2, max_size=4),
    st.sampled_from([20, 80, 300]),
    st.integers(0, 2**32),
)
async def test_equal_workers_share_the_traffic_again_after_wrong_measurements(
    poisoned: list[tuple[float, float]], requests: int, seed: int
) -> None:
    pool = LearningPool({f"w{n}": TRUE for n in range(len(poisoned))}, Random(seed))
    for _ in range(requests):
        for id, (ttft, tpot) in zip(pool.workers, poisoned, strict=True):
            await pool.answer(id, ttft=ttft, tpot=tpot)
    await pool.serve(250 * len(poisoned))
    shares = await pool.serve(100 * len(poisoned))
    assert min(shares.values()) > 0.5 / len(poisoned), shares


async def test_two_of_three_engines_that_seemed_80_times_as_fast_do_not_starve_the_third() -> None:
    """Learned from answers of 2 to 4 tokens, such rates once gave the third engine 0 of 200 requests, forever."""
    pool = LearningPool({"a": TRUE, "b": TRUE, "c": TRUE}, Random(1))
    for _ in range(80):
        for id, times in (("a", 1 / 80), ("b", 1 / 80), ("c", 1.0)):
            await pool.answer(id, tpot=times)
    assert (await pool.serve(100))["c"] == 0
    await pool.serve(400)
    assert min((await pool.serve(200)).values()) > 0.2


async def test_a_worker_that_is_really_slow_costs_few_requests() -> None:
    slow = replace(TRUE, prefill_us_per_token=120, attention_us_per_token_pair=0.004, tpot_base_us=28_000)
    pool = LearningPool({"a": TRUE, "b": TRUE, "slow": slow}, Random(1))
    for _ in range(100):
        for id in pool.workers:
            await pool.answer(id)
    shares = await pool.serve(1_500)
    assert 0 < shares["slow"] < 0.05
    assert min(shares["a"], shares["b"]) > 0.4


def test_evidence_fades_by_missed_requests_and_not_by_time() -> None:
    starvation = Starvation()
    busy, starved = Evidence(requests=1_000), Evidence(requests=100)
    for _ in range(10):
        starvation.update({"busy": busy, "starved": starved})  # a night without requests
    assert (starvation.kept("busy"), starvation.kept("starved"), starvation.kept("unknown")) == (1, 1, 1)
    kept = []
    for requests in range(1_000, 1_400, 20):
        starvation.update({"busy": Evidence(requests=requests), "starved": starved})
        kept.append(starvation.kept("starved"))
        assert starvation.kept("busy") == 1
    assert kept[0] == kept[1] == 1 and kept[-1] < 0.01 and kept == sorted(kept, reverse=True)
    starvation.update({"busy": Evidence(requests=1_400), "starved": Evidence(requests=101)})
    assert starvation.kept("starved") == 1
