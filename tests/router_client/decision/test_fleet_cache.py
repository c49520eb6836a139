"""The fleet records that a router decides by: how long they are kept, and what an empty read means."""

import pytest

from kvatlas.identity import Scope
from router_client.decision.fleet_cache import EMPTY_GRACE_S, FleetCache, LastKnownRecords
from tests.router_client.pools import SCOPE, CountingFleet, pool, worker

pytestmark = pytest.mark.anyio


async def test_records_are_read_again_after_200_ms() -> None:
    fleet, now = CountingFleet(pool(worker("w1"))), [100.0]
    cached = FleetCache(fleet, clock=lambda: now[0])
    for at, readings in [(100.0, 1), (100.199, 1), (100.2, 2), (100.3, 2), (200.0, 3)]:
        now[0] = at
        assert set((await cached.read_pool(SCOPE.pool_id)).records) == {"w1"}
        assert fleet.readings == readings
    assert (await cached.read_pool(Scope("other", "t").pool_id)).candidates == ()
    assert fleet.readings == 4


def test_an_empty_read_does_not_replace_the_records_at_once() -> None:
    records, now_s = pool(worker("w1")), [0.0]
    last = LastKnownRecords(lambda: now_s[0])
    assert last.update({}) == {}
    assert last.update(records) == records
    now_s[0] += EMPTY_GRACE_S
    assert last.update({}) == records
    now_s[0] += 0.1
    assert last.update({}) == {}
