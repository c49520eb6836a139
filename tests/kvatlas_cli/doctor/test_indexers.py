"""Faults of indexers."""

import pytest

from kvatlas.fleet_store.fleet_store import LEASES, FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas_cli.doctor import Level
from tests.kvatlas_cli.doctor.installation import Installation

pytestmark = pytest.mark.anyio


async def test_missing_indexers_and_owners_are_found(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    assert (await installation.problem("indexers.members")).level is Level.ERROR
    assert "64 of 64 partitions have no owner" in (await installation.problem("indexers.leases")).line
    fleet = FleetStore(installation.store)
    await fleet.claim_leases("ghost", 60_000, range(64))
    assert "ghost" in (await installation.problem("indexers.leases")).line
    await fleet.renew_membership("ghost", 60_000)
    assert (await installation.problem("indexers.members")).level is Level.INFO  # only one
    await installation.store.client.hdel(LEASES, "3", "5")
    assert "2 of 64 partitions have no owner: 3, 5" in (await installation.problem("indexers.leases")).line
