"""Replays: every request is served, equal seeds give equal figures, and better policies get better figures."""

from dataclasses import replace

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.generated_requests import WORKLOADS, generate
from kvatlas_simulator.lab.policies.catalogue import DYNAMO_POLICIES, POLICIES
from kvatlas_simulator.lab.replay import FleetSettings, Outage, draw_arrivals, replay
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.study import Point, Study, compare
from kvatlas_simulator.lab.summary import Figures, Objective

FLEET = FleetSettings(workers=4, cache_tokens=60_000)


def small(requests: int = 200) -> Workload:
    """A small generated workload."""
    return generate("chat", 0, requests)


def figures(
    policy: str, fleet: FleetSettings = FLEET, *, speed: float = 4.0, seed: int = 1, requests: int = 200
) -> Figures:
    return Figures.of(replay(small(requests), policy, fleet, seed, speed=speed), Objective())


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy not in DYNAMO_POLICIES])
def test_every_policy_serves_every_request_alike_in_two_runs(policy: str) -> None:
    workload = small(60)
    first, second = (replay(workload, policy, FLEET, 3, speed=4.0) for _ in range(2))
    assert len(first.served) == 60
    assert first == second
    computed = sum(one.input_tokens - one.cached_tokens for one in first.served)
    assert sum(first.prefilled_tokens) >= computed > 0
    assert all(one.ttft_us > 0 for one in first.served)


def test_a_study_is_the_same_on_any_number_of_processes() -> None:
    study = Study(small(40), ("random", "kvatlas"), [Point(2, 60_000, 4.0)], seeds=2)
    assert compare(study, jobs=2) == compare(study, jobs=1)


def test_seeds_change_what_comes_together_but_not_the_order_within_a_session() -> None:
    workload = small()
    assert draw_arrivals(workload, 1, 1.0) != draw_arrivals(workload, 2, 1.0)
    times: dict[int, list[float]] = {}
    for when_us, request in draw_arrivals(workload, 1, 1.0):
        times.setdefault(request.session, []).append(when_us - request.arrival_us)
    assert all(max(shifts) - min(shifts) < 1 for shifts in times.values())


def test_kvatlas_finds_more_cached_than_policies_without_sight() -> None:
    rates = {policy: figures(policy).hit_rate for policy in ("random", "round-robin", "least-loaded", "kvatlas")}
    assert rates["kvatlas"] > 1.1 * max(rate for policy, rate in rates.items() if policy != "kvatlas")


def test_late_events_cost_hits_only_for_policies_that_use_them() -> None:
    late = replace(FLEET, event_delay_us=600e6)
    assert figures("overlap-only", late).hit_rate < figures("overlap-only").hit_rate
    assert figures("least-loaded", late) == figures("least-loaded")


def test_a_lost_message_is_repaired_by_a_snapshot() -> None:
    lossy = figures("kvatlas", replace(FLEET, event_loss=0.05))
    assert lossy.lost_messages > 0
    assert lossy.snapshots > FLEET.workers
    assert lossy.hit_rate > figures("least-loaded").hit_rate


def test_a_slower_engine_shows_in_the_times() -> None:
    slow = replace(FLEET, cost=StepCost(prefill_us_per_token=450.0))
    assert figures("round-robin", slow, speed=1.0).ttft_p50_ms > 4 * figures("round-robin", speed=1.0).ttft_p50_ms


def test_a_request_larger_than_a_cache_is_one_clear_error() -> None:
    study = Study(small(), ("random",), [Point(1, 640)], seeds=1)
    with pytest.raises(InvalidValue, match="never fits a cache of 640 tokens; expected a larger --cache-tokens"):
        compare(study, jobs=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_generated_workloads_share_prefixes_and_repeat_by_seed(name: str) -> None:
    workload = generate(name, 5, 300)
    assert workload == generate(name, 5, 300) and workload != generate(name, 6, 300)
    seen: set[tuple[object, int]] = set()
    shared = 0
    for request in workload.requests:
        assert len(request.contents) == -(-(request.input_tokens + request.output_tokens) // workload.block_tokens)
        mine = [(request.identity, one) for one in request.prompt_contents(workload.block_tokens)]
        shared += sum(one in seen for one in mine) * workload.block_tokens
        seen.update(mine)
    assert 0.2 < shared / workload.prompt_tokens < 0.99


def test_answers_are_whole_sooner_if_a_choice_counts_whom_it_delays() -> None:
    def mean_answer_us(policy: str) -> float:
        served = replay(small(400), policy, FLEET, 1, speed=8.0).served
        return sum(one.ttft_us + one.tpot_us * max(0, one.output_tokens - 1) for one in served) / len(served)

    assert mean_answer_us("kvatlas") < mean_answer_us("kvatlas-no-interference")


def test_three_routers_with_shared_bookings_choose_as_one() -> None:
    """Though each learns from its own requests, and from the others' once a second."""
    one, shared, apart = (
        figures(policy, speed=8.0, requests=400)
        for policy in ("kvatlas", "kvatlas-3-replicas", "kvatlas-3-replicas-unshared")
    )
    assert shared.ttft_mean_ms == pytest.approx(one.ttft_mean_ms, rel=0.02)
    assert shared.hit_rate == pytest.approx(one.hit_rate, abs=0.002) and shared.hit_rate > apart.hit_rate


@pytest.mark.parametrize("policy", ["round-robin", "session", "sglang-router", "llm-d", "lmetric", "kvatlas", "oracle"])
def test_requests_of_an_engine_that_ends_are_served_elsewhere(policy: str) -> None:
    workload = small()
    outages = (Outage(0, 0.3, 0.3, 0.6), Outage(1, 0.7, 0.8, 1.0))
    lost, whole = (replay(workload, policy, replace(FLEET, outages=some), 1, speed=8.0) for some in (outages, ()))
    assert len(lost.served) == len(workload.requests)
    assert sum(lost.prefilled_tokens) > sum(whole.prefilled_tokens)  # what the engines held has to be computed again


def test_the_busiest_engine_can_be_lost() -> None:
    """In a nearly idle fleet, a given engine may have nothing to lose."""
    workload, outage = generate("agents", 3, 60), Outage(None, 0.5, 0.5, 0.9)
    whole, lost, *fixed = (
        replay(workload, "session", replace(FLEET, outages=outages), 1).served
        for outages in ((), (outage,), *((replace(outage, engine=number),) for number in range(4)))
    )
    assert lost in fixed
    assert max(one.ttft_us for one in lost) > max(one.ttft_us for one in whole)
