"""Requests for grants over a real NATS: each counts for the worker on whose subject it arrives."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import anyio
import pytest
from nats.aio.client import Client
from nats.errors import NoRespondersError

from kvatlas.bus.control import GrantReply, GrantRequest
from kvatlas.bus.subjects import grant_subject, partition_of
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.repair.grant_server import GrantServer
from kvatlas_indexer.repair.grants import LIMIT_BYTES, GrantBudget
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS
from tests.indexer.idle_readers import owned_partitions

pytestmark = pytest.mark.anyio

HOME = partition_of("w0", PARTITIONS)
NEIGHBOUR = next(name for n in count(1) if partition_of(name := f"w{n}", PARTITIONS) == HOME)
ELSEWHERE = next(name for n in count(1) if partition_of(name := f"w{n}", PARTITIONS) != HOME)


def request_of(worker_id: str, incarnation: int = 1) -> bytes:
    return GrantRequest(worker_id=worker_id, incarnation=incarnation, snapshot_bytes=LIMIT_BYTES).pack()


async def is_granted(nats_client: Client) -> bool:
    """Ask for a grant for w0, in its name."""
    try:
        reply = await nats_client.request(grant_subject("w0", PARTITIONS), request_of("w0"), timeout=60)
    except NoRespondersError:
        return False
    return GrantReply.unpack(reply.data).granted


@asynccontextmanager
async def grant_server(nats_client: Client, grants: GrantBudget) -> AsyncIterator[IndexerCounters]:
    """The counters of a server that owns every partition and has no open grants."""
    counters = IndexerCounters()
    async with owned_partitions(*range(PARTITIONS)) as owned, anyio.create_task_group() as group:
        group.start_soon(GrantServer(nats_client, owned, grants, counters, [PARTITIONS]).run)
        await until(lambda: is_granted(nats_client), what="it answers")
        grants.release("w0", 1)
        yield counters
        group.cancel_scope.cancel()


async def test_a_request_takes_nothing_in_another_workers_name(nats_client: Client) -> None:
    wrong = {
        "another worker of its partition": request_of(NEIGHBOUR),
        "a worker of another partition": request_of(ELSEWHERE),
        "an incarnation of no publisher": request_of("w0", (1 << 64) - 1),
        "no request": b"\xc1",
    }
    grants = GrantBudget()
    async with grant_server(nats_client, grants) as counters:
        for number, (what, payload) in enumerate(wrong.items(), 1):
            await nats_client.publish(grant_subject("w0", PARTITIONS), payload, reply=nats_client.new_inbox())
            await until(lambda n=number: counters.grants_bad == n, what=f"{what} is refused")  # type: ignore[misc]
            assert grants.outstanding_bytes == 0, what
        assert await is_granted(nats_client)


async def test_an_answer_goes_to_an_inbox_alone(nats_client: Client) -> None:
    answers = await nats_client.subscribe("kvatlas.control.*")
    async with grant_server(nats_client, GrantBudget()) as counters:
        before = counters.grants_given
        await nats_client.publish(grant_subject("w0", PARTITIONS), request_of("w0"), reply="kvatlas.control.w1")
        assert await is_granted(nats_client)
        await nats_client.flush()
        assert answers.pending_msgs == 0 and counters.grants_given == before + 1


async def test_a_worker_that_asks_too_often_keeps_no_other_one_waiting(nats_client: Client) -> None:
    async with grant_server(nats_client, GrantBudget()) as counters:
        for _ in range(1_000):
            await nats_client.publish(
                grant_subject(NEIGHBOUR, PARTITIONS), request_of(NEIGHBOUR), reply=nats_client.new_inbox()
            )
        assert not await is_granted(nats_client), "the neighbour has the whole budget"
        assert counters.grants_excess > 900
