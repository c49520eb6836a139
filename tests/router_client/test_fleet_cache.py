"""The fleet records on which a router bases decisions: how long they are kept, and what an empty read means."""

import pytest

from kvatlas.cost import EngineProfile, Load
from kvatlas.fleet.records import EngineState, FleetRecord, Liveness
from kvatlas.identity import Scope
from router_client.fleet_cache import EMPTY_GRACE_S, FleetCache, LastKnownRecords
from tests.router_client.pools import SCOPE, CountingFleet, pool, worker

pytestmark = pytest.mark.anyio

PROFILE = EngineProfile()


async def profile(pool_id: str) -> EngineProfile:
    return PROFILE


async def test_records_are_read_again_after_200_ms() -> None:
    fleet, now = CountingFleet(pool(worker("w1"))), [100.0]
    cached = FleetCache(fleet, clock=lambda: now[0])
    for at, readings in [(100.0, 1), (100.199, 1), (100.2, 2), (100.3, 2), (200.0, 3)]:
        now[0] = at
        assert set((await cached.read_pool(SCOPE.pool_id)).records) == {"w1"}
        assert fleet.readings == readings
    assert (await cached.read_pool(Scope("other", "t").pool_id)).candidates == ()
    assert fleet.readings == 4


async def test_what_is_worked_out_of_records_is_kept_until_more_than_loads_change() -> None:
    records, now = pool(worker("w1"), worker("w2")), [100.0]
    cached = FleetCache(CountingFleet(records), clock=lambda: now[0], profile=profile)
    first = await cached.read_pool(SCOPE.pool_id)
    now[0] += 1
    second = await cached.read_pool(SCOPE.pool_id)
    assert second is not first and second.candidates is first.candidates
    records["w2"] = worker("w2", load={"running_decodes": 7})
    now[0] += 1
    third = await cached.read_pool(SCOPE.pool_id)
    assert third.candidates is first.candidates  # a different load changes nothing that was computed
    assert third.loads["w1"] is None and third.loads["w2"] == Load(running_decodes=7)
    records["w2"] = worker("w2", state=EngineState.DRAINING)
    now[0] += 1
    fourth = await cached.read_pool(SCOPE.pool_id)
    assert [candidate.id for candidate in fourth.candidates] == ["w1"]


def test_a_pool_that_is_no_longer_read_keeps_its_records_for_a_while() -> None:
    records, other, now_s = pool(worker("w1")), {"w2": worker("w2", model_id="other")}, [0.0]
    last = LastKnownRecords(lambda: now_s[0])
    assert last.update({}) == {}
    assert last.update({**records, **other}) == {**records, **other}
    now_s[0] += (
        10 * EMPTY_GRACE_S
    )  # the store was away, and nothing was read: the time counts from the first read without it
    assert last.update({}) == {**records, **other}
    now_s[0] += EMPTY_GRACE_S / 2
    assert last.update(other) == {**records, **other}
    now_s[0] += EMPTY_GRACE_S / 2
    assert last.update(other) == {**records, **other}
    now_s[0] += 0.1
    assert last.update(other) == other
    assert last.update({}) == other
    now_s[0] += EMPTY_GRACE_S + 0.1
    assert last.update({}) == {}


def test_silent_workers_get_requests_only_if_no_other_worker_of_their_pool_can() -> None:
    """If all are silent at once, NATS or the publishers have failed, and the engines may well be serving."""

    def silent(id: str, state: EngineState = EngineState.UP, scope: Scope = SCOPE) -> FleetRecord:
        return worker(id, state=state, scope=scope).model_copy(update={"liveness": Liveness.LOST})

    def routable(*records: FleetRecord) -> list[str]:
        found = LastKnownRecords().update({record.endpoint.id: record for record in records})
        return [id for id, record in found.items() if record.routable]

    draining = silent("d", EngineState.DRAINING)
    assert routable(silent("a"), silent("b"), draining) == ["a", "b"]
    assert routable(silent("a"), worker("b"), draining) == ["b"]
    assert routable(silent("a"), worker("b", state=EngineState.DOWN)) == ["a"]
    assert routable(silent("a"), worker("o", model_id="other")) == ["a", "o"]
    assert routable(draining) == []
