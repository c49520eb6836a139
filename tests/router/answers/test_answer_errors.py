"""Errors that engines put into answers with status 200, comments that keep a connection alive, and odd forms of both."""

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvatlas.store.connection import Store
from tests.eventually import until
from tests.lazy_module import LazyModule
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import Answer, faulty_engine
from tests.router.proxy.raw_engine import HEAD, chunk, raw_engine
from tests.router.proxy.test_proxy import MESSAGES, PROMPT, decision, status

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

pytestmark = pytest.mark.anyio

PART = b'data: {"choices": [{"index": 0, "text": "a", "delta": {"content": "a"}}]}\n\n'
ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PING = b": keep-alive\n\n"
SAID: dict[str, Any] = {
    "message": "EngineCore encountered an issue",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}
ERROR = b"data: " + json.dumps({"error": SAID}).encode() + b"\n\n"
NAMED = b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "full"}}\n\n'
TOO_LONG = {"message": "the prompt is too long", "type": "BadRequestError", "param": None, "code": 400}
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}


def streams(*parts: bytes, kind: str = "text/event-stream", **headers: str) -> Answer:
    async def answer(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for part in parts:
                yield part
                await anyio.lowlevel.checkpoint()

        return StreamingResponse(body(), media_type=kind, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer


def says(body: object) -> Answer:
    async def answer(_: Request) -> Response:
        return JSONResponse(body)

    return answer


FAILURES: dict[str, Answer] = {
    "error": streams(ERROR, DONE),
    "in one piece": streams(ERROR + DONE),
    "behind a comment": streams(PING, ERROR, DONE),
    "behind a role": streams(ROLE, ERROR),
    "error event": streams(NAMED),
    "carriage returns": streams(ERROR.replace(b"\n", b"\r")),
    "odd content type": streams(ERROR, kind="Text/Event-Stream; Charset=UTF-8"),
    "nothing": streams(PING),
    "json": says({"error": SAID}),
    "old json": says({"object": "error", **SAID}),
    "problem json": streams(json.dumps({"error": SAID}).encode(), kind="application/problem+json"),
    "empty": streams(),
    "empty json": streams(kind="application/json"),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_error_in_place_of_an_answer_is_tried_elsewhere(store: Store, valkey_url: str, failure: str) -> None:
    streamed = "json" not in failure
    async with (
        faulty_engine(FAILURES[failure]) as bad,
        running_fleet(store, {"w1": {}}, {"w2": {"url": bad.url}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w2", PROMPT)
        answer = await client.post("/v1/completions", json={**BODY, "stream": streamed})
        assert answer.status_code == 200 and bad.asked == 1
        assert "error" not in answer.text and "choices" in answer.text
        counted = await status(client)
        assert (counted["outliers"]["bad"], counted["outliers"]["good"]) == (1, 1)
        assert counted["proxy"]["answered"] == 1 and counted["proxy"]["retried"] == 1


@pytest.mark.parametrize("failure", ["error", "json"])
async def test_an_engine_that_answers_with_errors_is_ejected_and_gets_no_prefix(
    store: Store, valkey_url: str, failure: str
) -> None:
    async with (
        faulty_engine(FAILURES[failure]) as bad,
        running_fleet(store, {}, {"w1": {"url": bad.url}}),
        running_proxy(valkey_url) as client,
    ):
        for _ in range(4):
            answer = await client.post("/v1/completions", json={**BODY, "stream": failure == "error"})
            assert (answer.status_code, answer.json()["error"]) == (500, SAID)
            assert decision(answer)[1]["cached"] == "0"
        counted = await status(client)
        assert counted["outliers"]["bad"] == 4 and counted["proxy"]["answered"] == 0 and "w1" in counted["ejected"]


async def test_an_error_behind_a_part_of_the_answer_passes_and_counts(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(streams(PART, ERROR)) as bad,
        running_fleet(store, {}, {"w1": {"url": bad.url}}),
        running_proxy(valkey_url) as client,
    ):
        for _ in range(4):
            answer = await client.post("/v1/completions", json={**BODY, "stream": True})
            assert answer.content == PART + ERROR, "the client has what the engine said"
        counted = await status(client)
        assert counted["outliers"]["bad"] == 4 and counted["proxy"]["broken"] == 4 and "w1" in counted["ejected"]


@pytest.mark.parametrize("dies", [False, True])
async def test_a_client_that_leaves_at_an_error_does_not_hide_it(store: Store, valkey_url: str, dies: bool) -> None:
    left = anyio.Event()

    async def answer(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield PART
            yield ERROR
            await left.wait()
            if dies:
                raise OSError
            yield DONE

        return StreamingResponse(body(), media_type="text/event-stream")

    async with (
        faulty_engine(answer) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url) as client,
    ):
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as streamed:
            async for part in streamed.aiter_raw():
                if b"error" in part:
                    break
        for _ in range(10):  # the router notices that the client disconnected
            await status(client)
        left.set()

        async def is_over() -> bool:
            return bool((await status(client))["in_flight"] == 0)

        await until(is_over, what="the request is over")
        counted = await status(client)
        assert (counted["proxy"]["gone"], counted["proxy"]["broken"], counted["outliers"]["bad"]) == (0, 1, 1)


@pytest.mark.parametrize("continues", ["off", "all"])
@pytest.mark.parametrize("behind", [b"", DONE], ids=["", "done"])
async def test_an_error_that_anthropics_clients_would_not_see_is_repeated_in_their_form(
    store: Store, valkey_url: str, continues: str, behind: bytes
) -> None:
    part = b'data: {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}\n\n'
    for error, repeated in ((ERROR, True), (NAMED, False)):
        async with (
            faulty_engine(streams(part, error, behind)) as bad,
            running_fleet(store, {}, {"w1": {"url": bad.url}}),
            running_proxy(valkey_url, continue_answers=continues) as client,
        ):
            body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "stream": True}
            text = (await client.post("/v1/messages", json=body)).text
            assert text.startswith((part + error).decode())
            last = text.removeprefix((part + error).decode())
            if repeated:
                assert last.startswith("event: error\n") and SAID["message"] in last
                assert b"[DONE]" not in text.encode().partition(b"event: error")[2]
            else:
                assert last in ("", behind.decode())


@pytest.mark.parametrize("end", [chunk(ERROR) + b"0\r\n\r\n", b""], ids=["error", "dies"])
async def test_what_an_engine_computed_before_it_failed_counts_as_lost(
    store: Store, valkey_url: str, end: bytes
) -> None:
    prompt = list(range(300))
    async with (
        raw_engine(HEAD + chunk(PART) + end) as bad,
        running_fleet(store, {}, {"w1": {"url": bad.url}}),
        running_proxy(valkey_url, tokenizer="none") as client,
    ):

        async def ask() -> bool:
            answer = await client.post("/v1/completions", json={**BODY, "prompt": prompt, "stream": True})
            assert '"error"' in answer.text
            return decision(answer)[1]["cached"] == "0"

        assert await ask()
        await until(ask, what="nothing is believed to be cached, once the failure is reported")


async def test_an_error_that_is_the_requests_own_is_answered_with_its_status(store: Store, valkey_url: str) -> None:
    event = b"data: " + json.dumps({"error": TOO_LONG}).encode() + b"\n\n"
    async with (
        faulty_engine(streams(PING, event, DONE)) as engine,
        running_fleet(store, {"w2": {}}, {"w1": {"url": engine.url}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w1", PROMPT)
        engine.answer = streams(event, DONE)
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert (answer.status_code, answer.json()["error"]) == (400, TOO_LONG)
        engine.answer = says({"error": TOO_LONG})
        answer = await client.post("/v1/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]) == (400, TOO_LONG)
        assert (await status(client))["outliers"]["bad"] == 0


async def test_if_every_engine_fails_the_client_has_the_last_ones_error(store: Store, valkey_url: str) -> None:
    async with (
        faulty_engine(streams(ERROR)) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url) as client,
    ):
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert (answer.status_code, answer.json()["error"]) == (500, SAID)
        seen = anyio.Event()

        async def comment(_: Request) -> Response:
            async def body() -> AsyncIterator[bytes]:
                yield PING
                await seen.wait()
                yield ERROR

            return StreamingResponse(body(), media_type="text/event-stream")

        engine.answer = comment
        text = b""
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as streamed:
            assert streamed.status_code == 200
            async for part in streamed.aiter_raw():
                text += part
                seen.set()
        assert text.startswith(PING) and SAID["message"].encode() in text.rpartition(b"data: ")[2]


@pytest.mark.parametrize("behind", [b"", chunk(ERROR) + b"0\r\n\r\n"], ids=["dies", "error"])
async def test_comments_reach_the_client_at_once_and_another_engine_may_answer_behind_them(
    store: Store, valkey_url: str, behind: bytes
) -> None:
    seen = anyio.Event()

    async def good(request: Request) -> Response:
        return await streams(PART, DONE)(request)

    async def comment(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield PING
            await seen.wait()
            if behind:
                yield ERROR
            else:
                raise ConnectionResetError("this engine dies here")

        return StreamingResponse(body(), media_type="text/event-stream")

    async with (
        faulty_engine(comment) as bad,
        faulty_engine(good) as well,
        running_fleet(store, {}, {"w1": {"url": well.url}, "w2": {"url": bad.url}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w2", PROMPT)
        text = b""
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
            async for part in answer.aiter_raw():
                text += part
                seen.set()
        lines = text.removeprefix(PING).split(b"\n\n", 1)
        assert lines[0].startswith(b': x-kvatlas-decision: "w1"') and lines[1] == PART + DONE
        assert (await status(client))["outliers"]["bad"] == 1


async def test_an_engine_that_answers_behind_its_own_comment_is_named_once(store: Store, valkey_url: str) -> None:
    async with (
        raw_engine(HEAD + chunk(PING) + chunk(PART) + chunk(DONE) + b"0\r\n\r\n") as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url) as client,
    ):
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
        assert answer.content == PING + PART + DONE and decision(answer)[0] == "w1"


FORMS = {
    "no space": b"data:[DONE]\n\n",
    "comment": b": bye\ndata: [DONE]\n\n",
    "event": b"event: done\ndata: [DONE]\n\n",
    "carriage returns": b"data: [DONE]\r\r",
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_client_that_leaves_at_the_end_in_any_spelling_is_answered(
    store: Store, valkey_url: str, form: str
) -> None:
    left = anyio.Event()

    async def answer(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield PART
            yield FORMS[form]
            await left.wait()

        return StreamingResponse(body(), media_type="text/event-stream")

    async with (
        faulty_engine(answer) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url) as client,
    ):
        async with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as streamed:
            async for part in streamed.aiter_raw():
                if b"[DONE]" in part:
                    break
        left.set()
        counted = (await status(client))["proxy"]
        assert (counted["gone"], counted["answered"]) == (0, 1)


async def test_lines_of_json_pass_as_they_come(store: Store, valkey_url: str) -> None:
    seen = anyio.Event()

    async def lines(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b'{"a": 1}\n'
            await seen.wait()  # the client has the first one
            yield b'{"a": 2}\n'

        return StreamingResponse(body(), media_type="application/jsonl")

    async with (
        faulty_engine(lines) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url, allow_path="/other") as client,
        client.stream("POST", "/other", json={"model": MODEL}) as streamed,
    ):
        parts = []
        async for part in streamed.aiter_raw():
            parts.append(part)
            seen.set()
        assert parts == [b'{"a": 1}\n', b'{"a": 2}\n']


async def test_a_stream_whose_lines_end_in_carriage_returns_passes_event_by_event(
    store: Store, valkey_url: str
) -> None:
    wanted = anyio.Event()

    async def answer(_: Request) -> Response:
        async def body() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield PART.replace(b"\n", b"\r")
                await wanted.wait()
            yield DONE

        return StreamingResponse(body(), media_type="text/event-stream")

    async with (
        faulty_engine(answer) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        running_proxy(valkey_url) as client,
        client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as streamed,
    ):
        text = b""
        async for part in streamed.aiter_raw():  # the engine waits until the first one has arrived
            text += part
            wanted.set()
        assert text == 3 * PART.replace(b"\n", b"\r") + DONE
