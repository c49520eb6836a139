"""Evidence of rates adds up in the store as in memory."""

from random import Random

import pytest

from kvatlas.cost import EngineRates
from kvatlas.cost.learned_rates import estimate_of
from kvatlas.cost.regression import FORM, SUMS, Evidence, Latency, Rate, Row
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations, WorkerReport
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from tests.kvatlas.reservations.asks import POOL, Clock

pytestmark = pytest.mark.anyio

NOTHING_KNOWN = estimate_of(Evidence(), EngineRates())


def evidence_of(seed: int, requests: int = 3) -> Evidence:
    """Evidence of a few random requests."""
    random, evidence = Random(seed), Evidence()
    for _ in range(requests):
        terms = tuple(random.uniform(0, 1e6) if random.random() < 0.7 else 0.0 for _ in Rate)
        row = Row(random.choice(list(Latency)), random.uniform(1, 1e6), terms)
        evidence = evidence.followed_by(Evidence.of([row], NOTHING_KNOWN))
    return evidence


async def report(reservations: Reservations, *workers: str) -> None:
    await reservations.report(POOL, {worker: WorkerReport(1) for worker in workers})


async def test_nothing_is_learned_at_first(reservations: Reservations) -> None:
    await report(reservations, "a")
    assert await reservations.read_evidence(POOL) == {}


async def test_evidence_of_several_routers_adds_up_and_older_evidence_fades(reservations: Reservations) -> None:
    await report(reservations, "a", "b")
    await reservations.add_evidence(POOL, {"a": evidence_of(1), "b": evidence_of(2)})
    await reservations.add_evidence(POOL, {"a": evidence_of(3)})
    both = evidence_of(1).followed_by(evidence_of(3))
    assert await reservations.read_evidence(POOL) == {
        "a": Evidence(6, sums=both.sums),
        "b": Evidence(3, sums=evidence_of(2).sums),
    }


async def test_a_forgotten_worker_has_no_evidence_and_gets_none(reservations: Reservations) -> None:
    await report(reservations, "a", "b")
    await reservations.add_evidence(POOL, {"a": evidence_of(1), "b": evidence_of(2)})
    await reservations.forget(POOL, "a")
    await reservations.add_evidence(POOL, {"a": evidence_of(3)})
    assert list(await reservations.read_evidence(POOL)) == ["b"]


async def test_a_restarted_engine_keeps_its_rates(reservations: Reservations) -> None:
    await report(reservations, "a")
    await reservations.add_evidence(POOL, {"a": evidence_of(1)})
    await reservations.report(POOL, {"a": WorkerReport(2)})
    assert list(await reservations.read_evidence(POOL)) == ["a"]


async def test_evidence_of_hundreds_of_workers_is_added_at_once(reservations: Reservations) -> None:
    workers = [f"w{number}" for number in range(250)]
    await report(reservations, *workers)
    await reservations.add_evidence(POOL, {worker: evidence_of(number, 1) for number, worker in enumerate(workers)})
    assert len(await reservations.read_evidence(POOL)) == 250


async def test_evidence_of_another_version_is_not_read_and_then_replaced(store: Store, clock: Clock) -> None:
    reservations = RedisReservations(store)
    await report(reservations, "a")
    await reservations.add_evidence(POOL, {"a": evidence_of(1)})
    key = pool_keys(POOL)[-1]
    packed: bytes = await store.client.hget(key, "a")
    assert packed[1] == FORM
    await store.client.hset(key, "a", packed[:1] + bytes([FORM + 1]) + packed[2:])
    assert await reservations.read_evidence(POOL) == {}
    await reservations.add_evidence(POOL, {"a": evidence_of(2)})
    assert await reservations.read_evidence(POOL) == {"a": Evidence(3, sums=evidence_of(2).sums)}


async def test_store_and_memory_add_up_to_the_same_bits(store: Store, clock: Clock) -> None:
    in_store, in_memory = RedisReservations(store), MemoryReservations(clock)
    random = Random(7)
    for one in (in_store, in_memory):
        await report(one, "a")
    for _ in range(40):
        sums = tuple(random.choice([0.0, 1.0, -3.0, 1e15, random.gauss(0, 1e6), random.random()]) for _ in range(SUMS))
        evidence = Evidence(random.randrange(1, 1_000), random.random(), random.random(), sums)
        for one in (in_store, in_memory):
            await one.add_evidence(POOL, {"a": evidence})
        assert await in_store.read_evidence(POOL) == await in_memory.read_evidence(POOL)
