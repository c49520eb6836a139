"""The queue in front of full engines: its order, its bounds, and who leaves it."""

import asyncio
from functools import partial

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.store.connection import Store
from kvatlas_router.admission.queue import AdmissionQueue, FairQueue, QueueFull, QueueSettings, Ticket
from tests.eventually import until
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.test_proxy import status as proxy_status

pytestmark = pytest.mark.anyio


def serve(queue: FairQueue) -> list[Ticket]:
    served = []
    while (ticket := queue.first()) is not None:
        queue.remove(ticket, served=True)
        served.append(ticket)
    return served


def test_tenants_take_turns_whoever_asks_for_more() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(0, "greedy", 100)
    for _ in range(3):
        queue.push(0, "modest", 100)
    tenants = [ticket.tenant for ticket in serve(queue)]
    assert tenants[:6].count("modest") == 3


def test_a_tenant_with_long_prompts_gets_as_many_tokens_not_as_many_requests() -> None:
    queue = FairQueue()
    for _ in range(8):
        queue.push(0, "long", 400)
        for _ in range(4):
            queue.push(0, "short", 100)
    tokens = {"long": 0, "short": 0}
    for ticket in serve(queue)[:20]:
        tokens[ticket.tenant] += ticket.tokens
        assert abs(tokens["long"] - tokens["short"]) <= 400


def test_an_urgent_request_of_one_tenant_costs_the_others_no_turn() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(1, "greedy", 100)
    queue.remove(queue.push(0, "greedy", 100), served=True)
    queue.push(1, "modest", 100)
    assert "modest" in [ticket.tenant for ticket in serve(queue)[:2]]


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 50)), max_size=40), st.data())
def test_lower_priorities_come_first_and_each_tenants_own_in_order(
    pushed: list[tuple[int, str, int]], data: st.DataObject
) -> None:
    queue = FairQueue()
    tickets = [queue.push(*one) for one in pushed]
    left = [ticket for ticket in tickets if data.draw(st.booleans())]
    for ticket in left:
        queue.remove(ticket, served=False)
    assert len(queue) == len(tickets) - len(left)
    assert queue.tokens == sum(t.tokens for t in tickets) - sum(t.tokens for t in left)
    served = serve(queue)
    assert [t.priority for t in served] == sorted(t.priority for t in served)
    for one in {(t.priority, t.tenant) for t in served}:
        own = [t.number for t in served if (t.priority, t.tenant) == one]
        assert own == sorted(own)


class Engine:
    """Room for some requests; `book` gives it out."""

    def __init__(self, room: int) -> None:
        self.room = room

    async def book(self) -> str | None:
        await asyncio.sleep(0)
        if self.room == 0:
            return None
        self.room -= 1
        return "booked"


async def test_requests_wait_for_room_in_order_and_within_bounds() -> None:
    engine, queue = Engine(1), AdmissionQueue(QueueSettings(requests=3, tokens=1_000, wait_s=30))
    served: list[str] = []

    async def ask(name: str, priority: int, tokens: int = 10) -> None:
        assert await queue.admit("pool", engine.book, priority=priority, tenant="t", tokens=tokens) == "booked"
        served.append(name)

    def waits(requests: int) -> bool:
        return queue.waiting() == requests

    def are_served(requests: int) -> bool:
        return len(served) == requests

    await ask("first", 0)
    async with anyio.create_task_group() as tasks:
        for number, (name, priority) in enumerate((("late", 1), ("soon", 0), ("urgent", -1))):
            tasks.start_soon(ask, name, priority)
            await until(partial(waits, number + 1), what="it waits")
        with pytest.raises(QueueFull, match="3 requests of 30 tokens wait already") as full:
            await ask("too many", 0)
        assert full.value.retry_after_s >= 1
        for number in range(3):
            engine.room += 1
            queue.record_end("pool")
            await until(partial(are_served, number + 2), what="one more was served")
    assert served == ["first", "urgent", "soon", "late"] and queue.waiting() == 0


async def test_a_request_waits_no_longer_than_it_may_and_leaves_when_its_client_does() -> None:
    engine, queue = Engine(0), AdmissionQueue(QueueSettings(requests=5, tokens=100, wait_s=0.05))
    admit = partial(queue.admit, "pool", engine.book, priority=0, tenant="t")
    with pytest.raises(QueueFull, match="the longest that a request may wait"):
        await admit(tokens=1)
    patient = AdmissionQueue(QueueSettings(requests=5, tokens=100, wait_s=30))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(patient.admit, "pool", engine.book, priority=0, tenant="t", tokens=90))
        await until(lambda: patient.waiting() == 1, what="it waits")
        with pytest.raises(QueueFull):
            await patient.admit("pool", engine.book, priority=0, tenant="t", tokens=20)
        tasks.cancel_scope.cancel()
    assert (queue.waiting(), patient.waiting()) == (0, 0)


async def test_the_proxy_holds_requests_back_until_an_engine_has_room(store: Store, valkey_url: str) -> None:
    full = {"active_request_slots": 1, "total_request_slots": 1}
    async with (
        running_fleet(store, {"w1": {}}, {"w1": {"running_decodes": 1, "forward_pass": full}}) as fleet,
        running_proxy(valkey_url, tokenizer="none", queue_requests=1, queue_wait_s=60) as client,
    ):
        answers = []
        body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 1}

        async def post() -> None:
            answers.append((await client.post("/v1/completions", json=body)).status_code)

        async def is_waiting() -> bool:
            await fleet.report("w1", running_decodes=1, forward_pass=full)  # a report is believed for some seconds
            return bool((await proxy_status(client))["waiting"] == 1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post)
            await until(is_waiting, what="the request waits")
            refused = await client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert answers == []
            await fleet.report("w1", running_decodes=0, forward_pass={**full, "active_request_slots": 0})
        assert answers == [200]
        counted = (await proxy_status(client))["proxy"]
        assert (counted["queued"], counted["queue_full"], counted["answered"]) == (1, 1, 1)
