"""Requests, whose bodies may be large, are freed when they end, not when the garbage collector runs next."""

import gc
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvatlas.http.bounded_protocol import BoundedProtocol
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from kvatlas_router.proxy.attempts import Attempts
from kvatlas_router.proxy.client_request import ClientRequest
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.upstream.engine_answer import EngineRequest, StreamedAnswer, WholeAnswer
from tests.eventually import until
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, PATIENT_MS, SCOPE, running_fleet, running_proxy
from tests.router.proxy.raw_engine import HEAD, chunk, raw_engine, silent_engine
from tests.router.proxy.test_lost_engine import EVENT
from tests.router.proxy.test_proxy import NOTHING_LISTENS, PROMPT, status

pytestmark = pytest.mark.anyio

OF_A_REQUEST = (ClientRequest, EngineRequest, Attempts, StreamedAnswer, WholeAnswer)
OF_A_CONNECTION = (BoundedProtocol, RequestResponseCycle)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # pytest keeps records, and the errors in them
    gc.collect()
    gc.freeze()  # so objects of other tests' modules are not listed
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()
    logging.disable(logging.NOTSET)


def objects(*kinds: type) -> list[str]:
    return [type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds)]


async def all_is_freed(client: httpx.AsyncClient, kinds: tuple[type, ...]) -> None:
    async def is_over() -> bool:
        return bool((await status(client))["in_flight"] == 0)

    await until(is_over, what="the request is over")
    await until(lambda: not objects(*kinds), what=f"all is freed: {objects(*kinds)}", deadline_s=10)


BODIES: dict[str, dict[str, Any]] = {"whole": {}, "stream": {"stream": True}, "refused": {"max_tokens": 0}}


@pytest.mark.parametrize("body", BODIES)
async def test_an_answered_request_is_freed(store: Store, valkey_url: str, body: str) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **BODIES[body]})
        await all_is_freed(client, OF_A_REQUEST)


ENDS = {
    "lost": (HEAD + chunk(EVENT), "off"),
    "lost with a seam": (HEAD + chunk(EVENT), "all"),
    "cut": (HEAD + chunk(EVENT) + b"0\r\n\r\n", "off"),
    "error": (
        HEAD + chunk(EVENT) + chunk(b'data: {"error": {"message": "no", "code": 500}}\n\n') + b"0\r\n\r\n",
        "off",
    ),
    "nothing": (b"", "off"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_request_whose_engine_fails_is_freed(store: Store, valkey_url: str, end: str) -> None:
    answer, continues = ENDS[end]
    async with (
        raw_engine(answer) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}, "w2": {"url": NOTHING_LISTENS}}),
        running_proxy(valkey_url, continue_answers=continues) as client,
    ):
        await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": True})
        await all_is_freed(client, OF_A_REQUEST)


@pytest.mark.parametrize("url", [NOTHING_LISTENS, "http://name.invalid:1"])
async def test_a_request_that_no_engine_tokenizes_or_answers_is_freed(store: Store, valkey_url: str, url: str) -> None:
    async with running_fleet(store, {}, {"w1": {"url": url}}), running_proxy(valkey_url) as client:
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "a text"})
        assert answer.status_code == 503
        await all_is_freed(client, (*OF_A_REQUEST, TextRequest))


async def test_a_connection_is_freed_when_its_client_closes_it(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url, tokenizer="none") as client:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}
        async with http_client(base_url=client.base_url) as other:
            assert (await other.post("/v1/completions", json=body)).status_code == 200
            before = len(objects(*OF_A_CONNECTION))
        await until(lambda: len(objects(*OF_A_CONNECTION)) < before, what="the connection is freed", deadline_s=10)


PART_OF_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
DEPARTURES: dict[str, tuple[bytes, dict[str, object]]] = {
    "before its tokens": (b"", {"prompt": "a text"}),
    "before the first byte": (b"", {"prompt": PROMPT, "stream": True}),
    "within JSON": (PART_OF_JSON, {"prompt": PROMPT}),
    "within a stream": (HEAD + chunk(EVENT), {"prompt": PROMPT, "stream": True}),
}


@pytest.mark.parametrize("departure", DEPARTURES)
async def test_nothing_is_left_of_a_request_whose_client_leaves(store: Store, valkey_url: str, departure: str) -> None:
    """Whatever its engine does, it counts once, and has no booking."""
    first, body = DEPARTURES[departure]
    _, _, reservations, *_ = pool_keys(SCOPE.pool_id)
    async with (
        silent_engine(first) as silent,
        running_fleet(store, {}, {"w1": {"url": silent.url}}),
        running_proxy(valkey_url, tokenizer_deadline_ms=PATIENT_MS) as client,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.post, json={"model": MODEL, **body}), "/v1/completions")
            await until(lambda: silent.heads, what="the engine is asked")
            tasks.cancel_scope.cancel()
        await all_is_freed(client, (*OF_A_REQUEST, TextRequest))

        async def is_free() -> bool:
            return not await store.client.hlen(reservations)

        await until(is_free, what="its booking is gone")
        counted = await status(client)
        proxy = counted["proxy"]
        assert (proxy["gone"], proxy["broken"], proxy["gave_up"], proxy["cut"], counted["outliers"]["bad"]) == (
            1,
            0,
            0,
            0,
            0,
        )
