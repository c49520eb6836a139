"""`/kvatlas/route` and `/kvatlas/done`: the same choice for routers in other languages."""

import struct
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvatlas.identity import pool_id
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from kvatlas_router.held_bookings import HeldBookings
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_simulator.http.chat_template import render
from router_client import Prompt, RouterClient, RouterSettings
from tests.chaos.proxy import TcpProxy
from tests.eventually import until
from tests.router.proxy.engines import MODEL, SCOPE, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

PROMPT = list(range(1_000, 3_000))
"""Long enough to be worth more than an idle worker."""


async def test_a_worker_is_chosen_booked_and_released(store: Store, valkey_url: str) -> None:
    async def released() -> bool:
        return not await store.client.zcard(pool_keys(pool_id(MODEL, MODEL))[3])

    async with (
        running_fleet(store, {"w1": {}, "w2": {}}) as fleet,
        running_proxy(valkey_url, learn=False) as client,
    ):
        await fleet.holds("w2", PROMPT)
        bodies: list[dict[str, Any]] = [
            {"token_ids": PROMPT},
            {"model_id": MODEL, "token_ids": PROMPT, "estimated_decode_tokens": 3},
            {"model": MODEL, "prompt": PROMPT},
        ]
        for body in bodies:
            answer = (await client.post("/kvatlas/route", json=body)).json()
            assert 0 < answer["ttft_us"] < answer["score_us"]
            assert (answer["worker"], answer["url"], answer["headers"]) == ("w2", fleet.urls["w2"], {})
            assert (answer["prompt_tokens"], answer["predicted_cached_tokens"]) == (2_000, 1_996)
            assert "w2" in answer["explanation"]
            first = {"id": answer["id"], "phase": "first_token"}
            assert (await client.post("/kvatlas/done", json=first)).json() == {"known": True}
            usage = {"prompt_tokens": 2_000, "completion_tokens": 3}
            done = {"id": answer["id"], "usage": usage}
            assert (await client.post("/kvatlas/done", json=done)).json() == {"known": True}
            assert (await client.post("/kvatlas/done", json=done)).json() == {"known": False}
            assert (await client.post("/kvatlas/done", json=first)).json() == {"known": False}
            await until(released, what="the store has heard of the end")
        counted = (await client.get("/status")).json()
        assert counted["held"] == 0 and counted["proxy"]["held"] == 3


async def test_route_tokenizes_a_chat_and_avoids_workers(store: Store, valkey_url: str) -> None:
    messages = [{"role": "user", "content": "Who holds this prefix? " * 100}]
    async with (
        running_fleet(store, {"w1": {}, "w2": {}}) as fleet,
        running_proxy(valkey_url, tokenizer_deadline_ms=20_000) as client,
    ):
        await fleet.holds("w2", list(render(messages).encode()))
        body = {"model": MODEL, "messages": messages}
        assert (await client.post("/kvatlas/route", json=body)).json()["worker"] == "w2"
        assert (await client.post("/kvatlas/route", json={**body, "avoid": ["w2"]})).json()["worker"] == "w1"
        none = await client.post("/kvatlas/route", json={**body, "avoid": ["w1", "w2"]})
        assert none.status_code == 503 and "none of 2 workers" in none.json()["error"]["message"]


async def load_of(store: Store, worker_id: str) -> int:
    """Number of requests booked on a worker according to the store."""
    packed = await store.client.hget(pool_keys(SCOPE.pool_id)[1], worker_id)
    return int(struct.unpack_from(">9d", packed)[7]) if packed else 0


async def test_any_router_ends_what_another_one_booked(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {"w1": {}}))
        one = await stack.enter_async_context(running_proxy(valkey_url, held_s=2))
        other = await stack.enter_async_context(running_proxy(valkey_url))
        ids = [(await one.post("/kvatlas/route", json={"token_ids": PROMPT})).json()["id"] for _ in range(2)]
        assert await load_of(store, "w1") == 2
        first = {"id": ids[0], "phase": "first_token"}
        assert (await other.post("/kvatlas/done", json=first)).json() == {"known": True}
        assert (await other.post("/kvatlas/done", json={"id": ids[0]})).json() == {"known": True}
        assert (await other.post("/kvatlas/done", json={"id": ids[1], "status": 500})).json() == {"known": True}
        assert await load_of(store, "w1") == 0
        for wrong in (ids[0], ids[0][:-2], "a", "", "=", "ÿ"):
            assert (await other.post("/kvatlas/done", json={"id": wrong})).json() == {"known": False}
        counted = (await other.get("/status")).json()
        assert counted["proxy"]["done_elsewhere"] == 2 and counted["outliers"]["bad"] == 1

        async def is_forgotten() -> bool:
            return bool((await one.get("/status")).json()["held"] == 0)

        await until(is_forgotten, what="the router that booked them no longer holds them")
        assert (await one.get("/status")).json()["proxy"]["held_expired"] == 0


async def test_a_booking_that_ended_at_another_router_is_let_go(store: Store, valkey_url: str) -> None:
    counters = ProxyCounters()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {"w1": {}}))
        client = await stack.enter_async_context(RouterClient.open(valkey_url, RouterSettings(deadline_ms=None)))
        other = await stack.enter_async_context(running_proxy(valkey_url))
        held = HeldBookings(client, counters, check_s=0.02)
        ids = [(await held.book(Prompt.of_tokens(SCOPE, PROMPT)))[0] for _ in range(3)]
        for id in ids[:2]:
            assert (await other.post("/kvatlas/done", json={"id": id})).json() == {"known": True}

        async def is_let_go() -> bool:
            return len(held) == 1

        await until(is_let_go, what="what ended elsewhere is held no more")
        assert not held.end(ids[0], None, well=True) and held.end(ids[2], None, well=True)
        await held.close()
        assert (counters.held, counters.held_done, counters.held_expired) == (3, 1, 0)


async def test_an_end_is_known_once_also_before_the_store_has_heard_of_it(store: Store, valkey_url: str) -> None:
    address = urlsplit(valkey_url)
    assert address.port is not None
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {"w1": {}}))
        line = await stack.enter_async_context(TcpProxy(address.port, "store"))
        url = valkey_url.replace(f":{address.port}", f":{line.port}")
        client = await stack.enter_async_context(RouterClient.open(url, RouterSettings(deadline_ms=None)))
        held = HeldBookings(client, ProxyCounters())
        id, _ = await held.book(Prompt.of_tokens(SCOPE, PROMPT))
        line.stall()
        assert held.end(id, None, well=True)
        assert not await held.first_token(id) and not await held.end_elsewhere(id, well=True)
        line.heal()
        await held.close()
        assert not await held.end_elsewhere(id, well=True)


async def test_a_model_that_nobody_serves_makes_no_pool(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        for number in range(20):
            hints = {"model_id": f"m{number}", "tokenizer_id": "t", "token_ids": [1, 2]}
            answer = await client.post("/kvatlas/route", json=hints)
            assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
        pools = {key.split(b"}")[0] async for key in store.client.scan_iter("kva:{pool:*")}
        assert len(pools) == 1


async def test_a_booking_whose_end_is_not_reported_expires(store: Store, valkey_url: str) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_fleet(store, {"w1": {}}))
        client = await stack.enter_async_context(running_proxy(valkey_url, held_s=0.01))
        answer = (await client.post("/kvatlas/route", json={"token_ids": PROMPT})).json()

        async def expired() -> bool:
            return bool((await client.get("/status")).json()["proxy"]["held_expired"] == 1)

        await until(expired, what="the booking expired")
        assert (await client.post("/kvatlas/done", json={"id": answer["id"]})).json() == {"known": False}


@pytest.mark.parametrize(
    ("path", "body", "code", "said"),
    [
        ("/kvatlas/route", {"model": "other", "prompt": [1]}, 404, "does not exist"),
        ("/kvatlas/route", {}, 400, "neither"),
        ("/kvatlas/route", {"token_ids": ["a"]}, 400, "token_ids"),
        ("/kvatlas/route", {"token_ids": [1], "avoid": "w1"}, 400, "avoid"),
        ("/kvatlas/done", {}, 400, "id"),
        ("/kvatlas/done", {"id": "x", "phase": "half"}, 400, "phase"),
    ],
)
async def test_a_wrong_call_is_one_line(
    store: Store, valkey_url: str, path: str, body: dict[str, Any], code: int, said: str
) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        answer = await client.post(path, json=body)
        assert answer.status_code == code and said in answer.json()["error"]["message"]
