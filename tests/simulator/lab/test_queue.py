"""Requests that wait while every engine is full, and those whose clients wait for other answers first."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvatlas_router.admission.queue import QueueSettings
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.lab.policies.atlas import Atlas, AtlasSettings
from kvatlas_simulator.lab.policies.catalogue import PolicyKind
from kvatlas_simulator.lab.replay import FleetSettings, Outcome, replay
from kvatlas_simulator.lab.requests import Identity, LabRequest, Workload

BLOCK_TOKENS = 64
FLEET = FleetSettings(2, 60_000, limits=SchedulerLimits(max_num_seqs=2, queue_limit=1 << 30))
PATIENT = QueueSettings(requests=1_000, tokens=1 << 40, wait_s=600)
FLOOD, OTHERS = 40, 4


def request(number: int, tenant: str, at_s: float = 0.0, **fields: float | int) -> LabRequest:
    tokens, answer = 3 * BLOCK_TOKENS, BLOCK_TOKENS
    contents = tuple(range(number * 10, number * 10 + 4))
    identity = Identity(None, tenant)
    return LabRequest(number, at_s * 1e6, tokens, answer, contents, 0, identity, **fields)  # type: ignore[arg-type]


def flood(weight: float = 1.0) -> Workload:
    """One tenant's requests at one router; then those of another one, of this weight, at several."""
    requests = [request(number, "flood", router=0) for number in range(FLOOD)]
    requests += [request(FLOOD + number, "other", 3.0, weight=weight) for number in range(OTHERS)]
    return Workload("flood", BLOCK_TOKENS, requests)


def serve(workload: Workload, queue: QueueSettings | None, routers: int = 1, *, shared: bool = True) -> Outcome:
    settings = AtlasSettings(replicas=routers, shared=shared, slots=True, queue=queue)
    kind = PolicyKind("", lambda fleet: Atlas(fleet.engines, fleet.index, fleet.cost, settings), uses_events=True)
    return replay(workload, kind, FLEET, 1)


def mean_wait_s(outcome: Outcome, numbers: Sequence[int]) -> float:
    return sum(one.ttft_us for one in outcome.served if one.number in numbers) / len(numbers) / 1e6


@pytest.mark.parametrize("routers", [1, 3])
def test_in_the_pools_queue_a_tenant_waits_for_no_flood(routers: int) -> None:
    others = range(FLOOD, FLOOD + OTHERS)
    queued, unqueued = serve(flood(), PATIENT, routers), serve(flood(), None, routers)
    assert len(queued.served) == len(unqueued.served) == FLOOD + OTHERS
    assert mean_wait_s(queued, others) < mean_wait_s(unqueued, others) / 2
    assert mean_wait_s(queued, range(FLOOD)) > mean_wait_s(queued, others)
    assert serve(flood(), PATIENT, routers) == queued


def test_what_waits_too_long_or_finds_the_queue_full_is_refused() -> None:
    hasty = serve(flood(), QueueSettings(requests=1_000, tokens=1 << 40, wait_s=2.0))
    short = serve(flood(), QueueSettings(requests=5, tokens=1 << 40, wait_s=600))
    for outcome in (hasty, short):
        assert len(outcome.served) + len(outcome.refused) == FLOOD + OTHERS
    assert hasty.refused and max(one.ttft_us for one in hasty.served) < 3e6
    first = short.refused[0]
    assert first <= 4 + 5 and list(short.refused) == list(range(first, FLOOD))  # at most four run, and five wait


def test_a_request_arrives_when_the_answer_that_its_client_waits_for_has_ended() -> None:
    requests = [request(0, "a"), request(1, "a", 2.0, after=0), request(2, "a", 1.0, after=1)]
    served = serve(Workload("chain", BLOCK_TOKENS, requests), None).served
    gaps_s = [(after.arrived_us - before.ended_us) / 1e6 for before, after in pairwise(served)]
    assert gaps_s == pytest.approx([2.0, 1.0])


def test_what_follows_a_refused_request_is_refused() -> None:
    requests = [request(number, "a") for number in range(8)]
    requests += [request(8, "a", 1.0, after=7), request(9, "a", 1.0, after=8)]
    outcome = serve(Workload("chain", BLOCK_TOKENS, requests), QueueSettings(requests=1, tokens=1 << 40))
    assert outcome.refused[-3:] == [7, 8, 9] and len(outcome.served) + len(outcome.refused) == 10
