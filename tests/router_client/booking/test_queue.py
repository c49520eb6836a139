"""A request that may wait: in the pool's queue, or in this router's own while the store is away."""

from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from kvatlas.fleet.records import FleetRecord
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.reservations import MustWait, QueueIsFull, QueueLimits, RedisReservations, WaitingRequest, WorkerReport
from kvatlas.store.connection import Store, connected_store
from router_client import Prompt, RouterClient, RouterSettings, StaticFleet
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
    """In small and large pools choices are made in different ways."""
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

        line.cut()
        with pytest.raises(MustWait) as alone:
            await client.reserve(waiting(4))
        assert (alone.value.alone, alone.value.place.requests) == (True, 1)
        rows = [row for number in (1, 4) if (row := waiting(number).waiting) is not None]
        turns, shared = await client.turns(SCOPE.pool_id, [], rows)
        assert (turns.own, turns.requests, len(turns.turns), shared) == (2, 2, 1, False)
        assert (await client.reserve(PROMPT)).worker_id in workers  # those that may not wait go to full engines
