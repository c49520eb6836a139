"""A worker's rates are learned from finished requests."""

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, EngineRates, Load, Piece, Plan, ReadRate
from kvatlas.cost.learned_rates import (
    FinishedRequest,
    LearnedRates,
    estimate_of,
    learned_rates_of,
    prior_of,
    rates_of_unknown,
    rows_of,
    with_learned_rates,
)
from kvatlas.cost.regression import MAX_FACTOR, MAY_BE_ZERO, MIN_FACTOR, RATES, Estimate, Evidence, Latency, Rate, Row
from kvatlas.errors import InvalidValue

DEFAULT = EngineRates()
OVERHEAD_US = 6_000.0
IDLE = Plan("w", 1_000, 100)

rates = st.builds(
    EngineRates,
    prefill_us_per_token=st.floats(8, 200),
    attention_us_per_token_pair=st.floats(0, 0.01),
    tpot_base_us=st.floats(1_500, 40_000),
    tpot_us_per_running=st.floats(0, 400),
    tpot_us_per_kv_token=st.floats(0, 0.3),
)


def true_request(rates: EngineRates, random: Random, *, noise: float = 0.05) -> FinishedRequest:
    """A request that took as long as it takes at these rates, plus what else happens to requests."""
    prompt, output = round(2 ** random.uniform(7, 13)), random.randrange(2, 400)
    cached = random.choice([0, 0, prompt // 2])
    load = Load(
        running_decodes=random.randrange(32),
        queued_prefill_tokens=random.choice([0, 0, 0, 500, 20_000]),
        kv_tokens=random.randrange(100_000),
    )
    ttft_us = OVERHEAD_US + rates.prefill_us_per_token * load.queued_prefill_tokens
    ttft_us += rates.prefill_us(prompt - cached, cached)
    kv_tokens = load.kv_tokens + prompt + output / 2
    tpot_us = tpot_of(rates, load.running_decodes + 1, kv_tokens)
    return FinishedRequest(
        plan=Plan("w", prompt, output, [Piece(cached, 0, Tier.HBM)] if cached else [], load),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached,
        ttft_us=ttft_us * random.lognormvariate(0, noise),
        tpot_us=tpot_us * random.lognormvariate(0, noise),
    )


def tpot_of(rates: EngineRates, running: int, kv_tokens: float) -> float:
    return rates.tpot_base_us + rates.tpot_us_per_running * running + rates.tpot_us_per_kv_token * kv_tokens


def broken(request: FinishedRequest, random: Random) -> FinishedRequest:
    """A request with meaningless times: a stall, a clock that jumped, an unknown retry."""
    times = random.choice([1e-6, 1e-3, 30, 1_000, 1e5])
    assert request.ttft_us is not None and request.tpot_us is not None
    return replace(request, ttft_us=request.ttft_us * times, tpot_us=request.tpot_us * times)


def learn(
    requests: Iterator[FinishedRequest], configured: EngineRates = DEFAULT, before: Evidence | None = None
) -> Evidence:
    """Learn as a router does: each request's errors are relative to what was known before."""
    evidence = before or Evidence()
    for number, request in enumerate(requests):
        if number % 4 == 0:
            estimate = estimate_of(evidence, configured)
        if rows := rows_of(request):
            evidence = evidence.followed_by(Evidence.of(rows, estimate))
    return evidence


def learned(evidence: Evidence, configured: EngineRates = DEFAULT) -> LearnedRates:
    return learned_rates_of(estimate_of(evidence, configured), configured)


def furthest_off(found: EngineRates, true: EngineRates) -> float:
    """The largest relative error of the predicted times of usual requests."""
    prefills = [found.prefill_us(new, 0) / true.prefill_us(new, 0) for new in (1_024, 4_096)]
    tpots = [tpot_of(found, *load) / tpot_of(true, *load) for load in ((4, 10_000), (24, 80_000))]
    return max(abs(times - 1) for times in (*prefills, *tpots))


def test_before_any_evidence_rates_are_as_configured() -> None:
    configured = EngineRates(prefill_us_per_token=80, tpot_base_us=3_000, local_ssd=ReadRate(1.0, 500.0))
    found = learned(Evidence(), configured)
    assert (found.requests, found.first_error) == (0, 0.5)
    for name in EngineRates.__dataclass_fields__:
        value, expected = getattr(found.rates, name), getattr(configured, name)
        if isinstance(value, ReadRate):
            value, expected = (value.setup_us, value.us_per_mib), (expected.setup_us, expected.us_per_mib)
        assert value == pytest.approx(expected), name


@pytest.mark.parametrize("times", [0.25, 4.0])
def test_an_unknown_worker_does_not_cost_more_than_the_others(times: float) -> None:
    prefill = {name: times * getattr(DEFAULT, name) for name in ("prefill_us_per_token", "attention_us_per_token_pair")}
    decode = {
        f"tpot_{name}": times * getattr(DEFAULT, f"tpot_{name}")
        for name in ("base_us", "us_per_running", "us_per_kv_token")
    }
    true = replace(DEFAULT, **prefill, **decode)
    known = [learn(true_request(true, random) for _ in range(200)) for random in map(Random, (1, 2))]
    found = rates_of_unknown(Evidence.sum_of(known), DEFAULT)
    assert furthest_off(found, true if times < 1 else DEFAULT) < 0.1
    assert furthest_off(rates_of_unknown(Evidence.sum_of([]), DEFAULT), DEFAULT) < 1e-9


def test_workers_of_nearly_equal_speed_cost_the_same_and_others_do_not() -> None:
    slow = replace(DEFAULT, prefill_us_per_token=2 * DEFAULT.prefill_us_per_token)
    evidence = {
        f"{name}{seed}": learn(true_request(true, Random(seed)) for _ in range(100))
        for name, true in (("like", DEFAULT), ("slow", slow))
        for seed in range(1, 5 if name == "like" else 2)
    }
    known = {id: learned(one, DEFAULT) for id, one in evidence.items()}
    profile = with_learned_rates(EngineProfile(), known, Evidence.sum_of(evidence.values()))
    prices = {id: profile.price(IDLE._replace(worker_id=id)) for id in known}
    assert len({known[id].rates for id in known}) == 5
    assert len({prices[id].score_us for id in known if id != "slow1"}) == 1
    assert prices["slow1"].ttft_us == pytest.approx(2 * (prices["like1"].ttft_us or 0), rel=0.2)
    assert prices["slow1"].tpot_us == prices["like1"].tpot_us


@settings(max_examples=40, derandomize=True)
@given(rates, st.integers(0, 2**32))
def test_200_requests_teach_rates_within_10_percent(true: EngineRates, seed: int) -> None:
    random = Random(seed)
    found = learned(learn(true_request(true, random) for _ in range(200)))
    assert furthest_off(found.rates, true) < 0.1


def test_5_percent_of_wildly_wrong_times_do_not_matter() -> None:
    errors = []
    for seed in range(100):
        random = Random(seed)
        true = EngineRates(
            prefill_us_per_token=random.uniform(8, 200),
            attention_us_per_token_pair=random.uniform(0, 0.01),
            tpot_base_us=random.uniform(1_500, 40_000),
            tpot_us_per_running=random.uniform(0, 400),
            tpot_us_per_kv_token=random.uniform(0, 0.3),
        )
        wrong = set(random.sample(range(200), 10))
        requests = (true_request(true, random) for _ in range(200))
        found = learned(learn(broken(one, random) if n in wrong else one for n, one in enumerate(requests)))
        errors.append(furthest_off(found.rates, true))
    assert sum(error >= 0.1 for error in errors) <= 1 and max(errors) < 0.15


def test_wrong_first_requests_are_forgotten() -> None:
    random = Random(1)
    requests = [true_request(DEFAULT, random) for _ in range(200)]
    found = learned(learn(iter([*(broken(one, random) for one in requests[:5]), *requests])))
    assert furthest_off(found.rates, DEFAULT) < 0.1


def test_a_worker_that_becomes_slower_is_learned_again() -> None:
    random = Random(2)
    slower = EngineRates(prefill_us_per_token=160, attention_us_per_token_pair=0.005, tpot_base_us=20_000)
    before = learn(true_request(DEFAULT, random) for _ in range(1_000))
    after = learn((true_request(slower, random) for _ in range(1_500)), before=before)
    assert furthest_off(learned(after).rates, slower) < 0.15


rows = st.builds(
    Row,
    st.sampled_from(Latency),
    st.floats(1e-3, 1e12),
    st.tuples(*(st.one_of(st.just(0.0), st.floats(0, 1e12)) for _ in Rate)),
)


@settings(max_examples=60)
@given(st.lists(rows, max_size=12))
def test_no_evidence_leads_out_of_the_bounds(rows: list[Row]) -> None:
    evidence, prior = Evidence(), prior_of(DEFAULT)
    for row in rows:
        evidence = evidence.followed_by(Evidence.of([row], Estimate.of(evidence, prior)))
    found = Estimate.of(evidence, prior)
    for rate in Rate:
        least = 0.0 if rate in MAY_BE_ZERO else MIN_FACTOR
        assert least <= found.factors[rate] <= MAX_FACTOR
    assert all(0 <= error <= 2 for error in found.errors)
    assert all(math.isfinite(value) for value in evidence.sums)


def test_two_routers_learn_what_one_would() -> None:
    random = Random(3)
    requests = [true_request(EngineRates(prefill_us_per_token=90), random) for _ in range(100)]
    judged = replace(estimate_of(Evidence(), DEFAULT), requests=1_000)
    each = [Evidence.of(rows, judged) for request in requests if (rows := rows_of(request))]
    one, first, second = Evidence(), Evidence(), Evidence()
    for number, evidence in enumerate(each):
        one = one.followed_by(evidence)
        if number < len(each) // 2:
            first = first.followed_by(evidence)
        else:
            second = second.followed_by(evidence)
    both = first.followed_by(second)
    assert both.requests == one.requests
    assert both.sums == pytest.approx(one.sums)
    assert furthest_off(learned(second.followed_by(first)).rates, learned(one).rates) < 0.03


def test_a_rate_without_evidence_of_its_own_follows_another_one() -> None:
    """A worker that computes fast also attends fast, and one that decodes slowly slows down more under load."""
    short = FinishedRequest(IDLE._replace(input_tokens=16), 16, 2, 0, ttft_us=5_000, tpot_us=28_000)
    long = FinishedRequest(IDLE._replace(input_tokens=64), 64, 2, 0, ttft_us=5_480, tpot_us=28_000)
    found = learned(learn(one for _ in range(50) for one in (short, long))).rates
    assert found.prefill_us_per_token / 40 == pytest.approx(found.attention_us_per_token_pair / 0.0013, rel=0.01)
    assert found.prefill_us_per_token == pytest.approx(10, rel=0.1)
    assert found.tpot_us_per_running == pytest.approx(4 * 40, rel=0.01)


def test_a_rate_that_is_configured_as_0_stays_0() -> None:
    configured = EngineRates(attention_us_per_token_pair=0)
    random = Random(4)
    found = learned(learn((true_request(DEFAULT, random) for _ in range(100)), configured), configured)
    assert found.rates.attention_us_per_token_pair == 0
    assert found.rates.prefill_us_per_token > DEFAULT.prefill_us_per_token


@pytest.mark.parametrize(("tier", "own"), [(Tier.CPU_DRAM, True), (Tier.LOCAL_SSD, True), (Tier.HBM, False)])
def test_transfers_are_learned_by_tier(tier: Tier, own: bool) -> None:
    random = Random(5)
    true = EngineRates(cpu_dram=ReadRate(150, 150), local_ssd=ReadRate(40, 40), remote_hbm=ReadRate(200, 50))

    def requests() -> Iterator[FinishedRequest]:
        for _ in range(200):
            tokens = random.randrange(1_024, 8_192)
            pieces = [Piece(tokens, tokens << 17, tier, own)] if random.random() < 0.7 else []
            plan = Plan("w", 8_500, 10, pieces)
            new = plan.new_tokens
            ttft_us = OVERHEAD_US + true.prefill_us(new, plan.cached_tokens) + sum(true.read_us(p) for p in pieces)
            ttft_us *= random.lognormvariate(0, 0.1)
            yield FinishedRequest(plan, 8_500, 10, plan.cached_tokens, ttft_us=ttft_us)

    found = learned(learn(requests())).rates
    read = found.read_rate(tier)
    assert read.us_per_mib == pytest.approx(true.read_rate(tier).us_per_mib, rel=0.1)
    assert read.setup_us / read.us_per_mib == pytest.approx(
        DEFAULT.read_rate(tier).setup_us / DEFAULT.read_rate(tier).us_per_mib
    )
    other = Tier.OBJECT_STORE
    assert found.read_rate(other).us_per_mib == pytest.approx(DEFAULT.read_rate(other).us_per_mib)


GOOD = FinishedRequest(IDLE, 1_000, 100, 0, ttft_us=46_000, tpot_us=7_000)
BUSY = Plan("w", 1_000, 100, load=Load(queued_prefill_tokens=900))
READS = Plan("w", 1_000, 100, [Piece(512, 1 << 26, Tier.CPU_DRAM)])


@pytest.mark.parametrize(
    ("request_", "measured"),
    [
        (GOOD, [Latency.TTFT, Latency.TPOT]),
        (replace(GOOD, load_known=False), []),
        (replace(GOOD, prompt_tokens=0), []),
        (replace(GOOD, output_tokens=0), []),
        (replace(GOOD, output_tokens=1), [Latency.TTFT]),
        (replace(GOOD, ttft_us=None), [Latency.TPOT]),
        (replace(GOOD, tpot_us=None), [Latency.TTFT]),
        (replace(GOOD, ttft_us=0.0), [Latency.TPOT]),
        (replace(GOOD, ttft_us=-5.0, tpot_us=-1.0), []),
        (replace(GOOD, ttft_us=math.nan, tpot_us=math.inf), []),
        (replace(GOOD, cached_tokens=1_000), [Latency.TPOT]),
        (replace(GOOD, cached_tokens=-1), [Latency.TPOT]),
        (replace(GOOD, cached_tokens=None), [Latency.TTFT, Latency.TPOT]),
        (replace(GOOD, cached_tokens=None, prompt_tokens=990), [Latency.TPOT]),
        (replace(GOOD, waited=True), [Latency.TPOT]),
        (replace(GOOD, plan=BUSY), [Latency.TPOT]),
        (replace(GOOD, plan=IDLE._replace(load=Load(waiting_requests=1))), [Latency.TPOT]),
        (replace(GOOD, plan=READS, cached_tokens=512), [Latency.TTFT, Latency.TPOT]),
        (replace(GOOD, plan=READS, cached_tokens=496), [Latency.TPOT]),
    ],
)
def test_a_request_measures_only_what_is_sure(request_: FinishedRequest, measured: list[Latency]) -> None:
    """It does not measure the prefill if too much was queued, or if it is unknown what was read or computed."""
    assert [row.latency for row in rows_of(request_)] == measured


def test_the_load_of_a_request_is_the_mean_of_that_at_its_start_and_its_end() -> None:
    after = Load(running_decodes=5, kv_tokens=9_000)
    start, mean = (rows_of(one)[1].terms for one in (GOOD, replace(GOOD, load_after=after)))
    assert start[Rate.TPOT_RUNNING] == 40 * 1
    assert mean[Rate.TPOT_RUNNING] == 40 * 3
    assert mean[Rate.TPOT_KV] == pytest.approx(0.045 * ((1_000 + 9_000) / 2 + 50))


def test_a_worker_without_evidence_costs_what_the_fastest_known_one_costs() -> None:
    """Known workers are slower than configured, and a new one does not look better than they do."""
    slow, slower = (
        replace(DEFAULT, prefill_us_per_token=times * 40.0, tpot_base_us=times * 7_000.0) for times in (2.0, 3.0)
    )
    known = {id: learn(true_request(true, Random(1)) for _ in range(200)) for id, true in (("a", slow), ("b", slower))}
    learned_ = {id: learned(evidence) for id, evidence in known.items()}
    found = with_learned_rates(EngineProfile(), learned_, Evidence.sum_of(known.values()))
    assert found.rates.prefill_us(1_000, 0) == found.by_worker["a"].prefill_us(1_000, 0)
    assert found.rates.tpot_us(8, 16_000) == found.by_worker["a"].tpot_us(8, 16_000)
    assert found.by_worker["b"].prefill_us(1_000, 0) > 1.2 * found.rates.prefill_us(1_000, 0)


def test_learned_rates_price_their_worker_and_those_of_which_nothing_is_known() -> None:
    other = EngineRates(prefill_us_per_token=1)
    profile = EngineProfile(by_worker={"b": other})
    evidence = learn(iter([GOOD]))
    found = with_learned_rates(profile, {"a": learned(evidence)}, evidence)
    assert found.by_worker["b"] == other
    for worker_id in ("a", "b", "c"):
        plan = IDLE._replace(worker_id=worker_id)
        rates = found.by_worker.get(worker_id, found.rates)
        assert found.price(plan).ttft_us == round(rates.prefill_us(1_000, 0))
        assert found.prices(plan).token_us == rates.prefill_us_per_token


def test_evidence_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidValue, match=f"evidence of {RATES} sums"):
        Evidence(1, sums=(0.0,) * RATES)
