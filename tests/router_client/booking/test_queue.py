"""A request that may wait: in the pool's queue, or in this router's own while the store is away."""

from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from kvatlas.fleet.records import FleetRecord
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.reservations import MustWait, QueueIsFull, QueueLimits, RedisReservations, WaitingRequest, WorkerReport
from kvatlas.store.circuit_breaker import FAILURES
from kvatlas.store.connection import Store, connected_store
from router_client import Prompt, RouterClient, RouterSettings, StaticFleet
from router_client.prompt import Strategy
from router_client.settings import BookingSettings
from tests.chaos.proxy import LOOPBACK, TcpProxy
from tests.router_client.pools import SCOPE, pool, worker

pytestmark = pytest.mark.anyio

FULL = {"running_decodes": 1, "forward_pass": {"active_request_slots": 1, "total_request_slots": 1}}
PROMPT = Prompt.of_tokens(SCOPE, list(range(1_000)), output_tokens=10)


def waiting(number: int, requests: int = 5) -> Prompt:
    request = WaitingRequest(number.to_bytes(16, "big"), "tenant", QueueLimits(requests, 1_000_000), 1_000, 10)
    return replace(PROMPT, waiting=request)


async def report(store: Store, workers: dict[str, FleetRecord]) -> None:
    reports = {id: WorkerReport.of(record, 0) for id, record in workers.items()}
    await RedisReservations(store).report(SCOPE.pool_id, reports)


@pytest.mark.parametrize("size", [2, 40])
async def test_a_request_waits_in_the_pools_queue_and_alone_while_the_store_is_away(
    store: Store, valkey_url: str, size: int
) -> None:
    """In small and large pools, choices are made in different ways."""
    workers = pool(*(worker(f"w{number}", load=FULL) for number in range(size)))
    await report(store, workers)
    async with (
        TcpProxy(urlsplit(valkey_url).port or 0, "store") as line,
        connected_store(f"redis://{LOOPBACK}:{line.port}", wait=False) as behind_line,
    ):
        index = MemoryIndex()
        settings = RouterSettings(deadline_ms=60_000, most_deadline_ms=60_000)
        client = RouterClient(index, StaticFleet(workers), settings, reservations=RedisReservations(behind_line))
        with pytest.raises(MustWait) as first:
            await client.reserve(waiting(1))
        assert (first.value.alone, first.value.place.requests) == (False, 1)
        assert first.value.request == waiting(1).waiting
        with pytest.raises(MustWait) as among:
            await client.reserve(waiting(2), avoid=["w0"])
        assert among.value.request is not None and among.value.request.workers == frozenset(workers) - {"w0"}
        turns, shared = await client.turns(SCOPE.pool_id, [], [])
        assert (turns.own, list(turns.turns), shared) == (2, [waiting(1).waiting.id], True)  # type: ignore[union-attr]
        with pytest.raises(QueueIsFull):
            await client.reserve(waiting(3, requests=2))
        again = waiting(5).waiting
        assert again is not None
        again_at_once = replace(PROMPT, waiting=replace(again, may_wait=False))
        assert (await client.reserve(again_at_once, avoid=["w0"])).worker_id in workers.keys() - {"w0"}

        line.cut()
        for _ in range(FAILURES + 1):  # a store that fails once may still keep the order
            with pytest.raises(MustWait) as alone:
                await client.reserve(waiting(4))
        assert (alone.value.alone, alone.value.place.requests) == (True, 1)
        rows = [row for number in (1, 4) if (row := waiting(number).waiting) is not None]
        turns, shared = await client.turns(SCOPE.pool_id, [], rows)
        assert (turns.own, turns.requests, len(turns.turns), shared) == (2, 2, 1, False)
        assert (await client.reserve(PROMPT)).worker_id in workers  # requests that may not wait go to full engines


def cache(blocks: int, running: int = 0) -> dict[str, object]:
    metrics = {"active_request_slots": running, "total_request_slots": 1, "total_kv_blocks": blocks}
    return {"running_decodes": running, "forward_pass": metrics}


@pytest.mark.parametrize("size", [2, 40])
@pytest.mark.parametrize("booked", [True, False])
async def test_a_prompt_that_no_cache_can_hold_does_not_wait_and_others_wait_for_the_caches_that_can(
    store: Store, size: int, booked: bool
) -> None:
    workers = pool(*(worker(f"w{number}", load=cache(60)) for number in range(size)))  # 960 tokens each
    await report(store, workers)
    settings = RouterSettings(deadline_ms=60_000, most_deadline_ms=60_000, booking=BookingSettings(reservations=booked))
    client = RouterClient(MemoryIndex(), StaticFleet(workers), settings, reservations=RedisReservations(store))
    assert (await client.reserve(waiting(1))).over
    assert (await client.turns(SCOPE.pool_id, [], []))[0].requests == 0

    workers |= pool(worker("large", load=cache(100, running=1)))
    await report(store, workers)
    client = RouterClient(MemoryIndex(), StaticFleet(workers), settings, reservations=RedisReservations(store))
    with pytest.raises(MustWait) as error:
        await client.reserve(waiting(2))
    assert error.value.request is not None and error.value.request.workers == frozenset({"large"})
    assert (error.value.place.requests, error.value.alone) == (1, not booked)


async def test_a_prompt_that_follows_a_policy_waits_for_its_worker_only(store: Store) -> None:
    workers = pool(worker("w0", load=FULL), worker("w1", load=FULL))
    await report(store, workers)
    settings = RouterSettings(deadline_ms=60_000, most_deadline_ms=60_000)
    client = RouterClient(MemoryIndex(), StaticFleet(workers), settings, reservations=RedisReservations(store))
    chosen: set[str] = set()
    for number in range(2):
        with pytest.raises(MustWait) as error:
            await client.reserve(replace(waiting(number), strategy=Strategy.ROUND_ROBIN))
        assert error.value.request is not None and error.value.request.workers is not None
        chosen |= error.value.request.workers
    assert chosen == {"w0", "w1"}
    turns, _ = await client.turns(SCOPE.pool_id, [], [])
    assert len(turns.turns) == 2


async def test_a_late_answer_of_the_store_lets_no_request_overtake_those_that_wait(
    store: Store, valkey_url: str
) -> None:
    workers = pool(worker("w0", load=cache(100, running=1)))
    await report(store, workers)
    async with (
        TcpProxy(urlsplit(valkey_url).port or 0, "store") as line,
        connected_store(f"redis://{LOOPBACK}:{line.port}", wait=False) as behind_line,
    ):
        settings = RouterSettings(deadline_ms=200, most_deadline_ms=200)
        fleet = StaticFleet(workers)
        client = RouterClient(MemoryIndex(), fleet, settings, reservations=RedisReservations(behind_line))
        with pytest.raises(MustWait):
            await client.reserve(waiting(1))
        fleet.records = pool(worker("w0", load=cache(100)))  # has room again
        line.stall()
        with pytest.raises(MustWait) as late:
            await client.reserve(waiting(2))
        assert (late.value.filed, late.value.alone, late.value.place.requests) == (False, False, 1)
        line.heal()
