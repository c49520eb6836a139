"""Leases in a store that forgets everything, or whose clock goes back (another server's, or stepped)."""

import anyio
import pytest
from nats.aio.client import Client

from indexer.counters import IndexerCounters
from indexer.ownership.membership import Membership
from kvatlas.fleet.store import LEASES, MEMBERS, FleetStore
from kvatlas.store.connection import Store
from tests.eventually import until

pytestmark = pytest.mark.anyio

PARTITIONS = 64
HOUR_MS = 3_600_000
TTL_MS = 200


async def server_ms(store: Store) -> int:
    seconds, us = await store.client.time()
    return int(seconds) * 1000 + int(us) // 1000


async def test_leases_of_the_dead_end_although_the_clock_went_back(store: Store, fleet: FleetStore) -> None:
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


async def test_a_live_members_lease_goes_on_although_the_clock_went_back(store: Store, fleet: FleetStore) -> None:
    ends_ms = await server_ms(store) + HOUR_MS
    await store.client.hset(LEASES, "3", f"{ends_ms} b")
    await store.client.hset(MEMBERS, "b", ends_ms)
    await fleet.renew_membership("a", HOUR_MS // 2)
    assert await fleet.claim_leases("a", HOUR_MS // 2, [3]) == []
    assert await fleet.renew_membership("b", HOUR_MS // 2) == ["a", "b"]
    assert await fleet.claim_leases("b", HOUR_MS // 2, [3]) == [3]


async def test_no_partition_moves_where_the_store_forgot_everything(
    store: Store, fleet: FleetStore, client: Client
) -> None:
    async def stop(_: object) -> None:
        pass

    counters = [IndexerCounters(), IndexerCounters()]
    replicas = [
        Membership(name, PARTITIONS, fleet=fleet, client=client, counters=mine, start=lambda _: None, stop=stop)
        for name, mine in zip("ab", counters, strict=True)
    ]

    async def is_shared() -> bool:
        held = [partition for one in replicas for partition in one.held]
        told = sorted(await fleet.leases())
        return all(one.held for one in replicas) and sorted(held) == list(range(PARTITIONS)) == told

    async with anyio.create_task_group() as tasks:
        for one in replicas:
            tasks.start_soon(one.run)
        await until(is_shared, what="both hold their share")
        before = [(mine.partitions_taken, mine.partitions_given) for mine in counters]
        await store.client.flushall()
        await until(is_shared, what="the store knows it again")
        assert [(mine.partitions_taken, mine.partitions_given) for mine in counters] == before
        tasks.cancel_scope.cancel()
