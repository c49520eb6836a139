"""Members and leases in a store that loses everything, or whose clock goes back (it is another server's, or was set)."""

import anyio
import pytest
from nats.aio.client import Client

from kvatlas.fleet_store.fleet_store import LEASES, MEMBERS, FleetStore
from kvatlas.store.connection import Store
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.lease_renewal import Membership
from tests.eventually import until
from tests.indexer.idle_readers import owned_partitions

pytestmark = pytest.mark.anyio

PARTITIONS = 64
HOUR_MS = 3_600_000
TTL_MS = 200


async def server_ms(store: Store) -> int:
    seconds, us = await store.client.time()
    return int(seconds) * 1000 + int(us) // 1000


async def test_a_dead_members_lease_expires_although_the_clock_went_back(store: Store, fleet: FleetStore) -> None:
    ends_ms = await server_ms(store) + HOUR_MS
    await store.client.hset(LEASES, "3", f"{ends_ms} dead")
    await store.client.hset(MEMBERS, "dead", ends_ms)
    assert await fleet.renew_membership("a", TTL_MS) == ["a", "dead"]
    assert await fleet.claim_leases("a", TTL_MS, [2, 3]) == [2]

    async def takes_over() -> bool:
        return await fleet.renew_membership("a", TTL_MS) == ["a"] and await fleet.claim_leases("a", TTL_MS, [2, 3]) == [
            2,
            3,
        ]

    await until(takes_over, what="member and lease are over")


async def test_a_live_members_lease_is_kept_although_the_clock_went_back(store: Store, fleet: FleetStore) -> None:
    ends_ms = await server_ms(store) + HOUR_MS
    await store.client.hset(LEASES, "3", f"{ends_ms} b")
    await store.client.hset(MEMBERS, "b", ends_ms)
    await fleet.renew_membership("a", HOUR_MS // 2)
    assert await fleet.claim_leases("a", HOUR_MS // 2, [3]) == []
    assert await fleet.renew_membership("b", HOUR_MS // 2) == ["a", "b"]
    assert await fleet.claim_leases("b", HOUR_MS // 2, [3]) == [3]


async def test_no_partition_moves_when_the_store_loses_everything(
    store: Store, fleet: FleetStore, nats_client: Client
) -> None:
    counters = [IndexerCounters(), IndexerCounters()]
    replicas: list[Membership] = []

    async def is_shared() -> bool:
        held = [partition for one in replicas for partition in one.held]
        leased = sorted(await fleet.leases())
        return all(one.held for one in replicas) and sorted(held) == list(range(PARTITIONS)) == leased

    async with owned_partitions() as of_a, owned_partitions() as of_b, anyio.create_task_group() as tasks:
        for name, owned, mine in zip("ab", (of_a, of_b), counters, strict=True):
            replicas.append(Membership(name, PARTITIONS, fleet=fleet, client=nats_client, owned=owned, counters=mine))
            tasks.start_soon(replicas[-1].run)
        await until(is_shared, what="both hold leases")
        before = [(mine.partitions_taken, mine.partitions_given) for mine in counters]
        await store.client.flushall()
        await until(is_shared, what="the store has all leases again")
        assert [(mine.partitions_taken, mine.partitions_given) for mine in counters] == before
        tasks.cancel_scope.cancel()
