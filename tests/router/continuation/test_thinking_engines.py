"""Engines that parse reasoning die in the middle of it: another one's tokens continue it, and the router parses them."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvatlas.store.connection import Store
from kvatlas_router.ejection.retry_budget import RetryBudget
from tests.router.continuation.exact_engine import END, MARKERS, OPENED, PROMPT, START, ExactEngine
from tests.router.continuation.mortal_engine import read_stream
from tests.router.continuation.test_continued_streams import TOOL
from tests.router.continuation.test_seam import thoughts
from tests.router.proxy.engines import MODEL, PATIENT_MS, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine
from tests.router.proxy.test_proxy import status

pytestmark = pytest.mark.anyio

THOUGHT, WORDS = ["\n", "A", " w", "ü", ".", "\n"], ["\n\n", "The", " worker", "."]
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Say"}], "max_tokens": 99, "stream": True}
USAGE = {"stream_options": {"include_usage": True}, "temperature": 0}


class ThinkingEngine:
    """Its next streams each end after the number of events in `after`. It tokenizes its answer and the markers; in other
    texts, each character is a token."""

    def __init__(self, engine: ExactEngine) -> None:
        self.engine = engine
        self.after: list[int] = []
        self.asked: list[str] = []

    async def answer(self, request: Request) -> Response:
        path, body = request.url.path, json.loads(await request.body() or b"{}")
        if path == "/tokenize":
            return JSONResponse({"tokens": self._tokens(body)})
        if not body.get("stream"):
            return JSONResponse({"error": "not here"}, 404)
        self.asked.append(path)
        if "messages" in body:
            body["prompt"] = self._tokens(body)
        return StreamingResponse(self._stream(self.engine.stream(body)), media_type="text/event-stream")

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            last = body["messages"][-1]
            if last["role"] == "assistant":
                text = last["content"]
                begun = [MARKERS.ids[0]] if self.engine.opened else []
                return [*PROMPT, *begun, *self._read(text.removeprefix(START) if self.engine.opened else text)]
            return list(OPENED if self.engine.opened else PROMPT)
        return list(MARKERS.ids) if body["prompt"] == START + END else self._read(body["prompt"])

    def _read(self, text: str) -> list[int]:
        tokens = self.engine.tokens
        known = (at for at in range(len(tokens) + 1) if "".join(tokens[:at]) == text)
        return self.engine.ids[:at] if (at := next(known, None)) is not None else list(text.encode())

    async def _stream(self, events: list[bytes]) -> AsyncIterator[bytes]:
        after = self.after.pop(0) if self.after else len(events)
        for event in events[:after]:
            yield event
        if after < len(events):
            raise ConnectionResetError


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize(
    ("more", "path"),
    [({}, "/v1/completions"), ({"stop": "zzz"}, "/v1/completions"), ({"tools": [TOOL]}, "/v1/chat/completions")],
)
async def test_reasoning_goes_on_after_each_event(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, opened: bool, more: dict[str, Any], path: str
) -> None:
    """With the ids that engines return; with those of its text if they return none, as with stop strings; or, if it may call a
    tool, as a partial message that renders to these ids and that the engine parses itself."""
    monkeypatch.setattr(RetryBudget, "take", lambda _: True)
    script = ThinkingEngine(ExactEngine([*([] if opened else [START]), *THOUGHT, END, *WORDS], opened=opened))
    body = {**BODY, **USAGE, **more}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for worker_id in ("w0", "w1", "w2"):
            engine = await stack.enter_async_context(faulty_engine(script.answer))
            await fleet.report(worker_id, engine.url)
        settings = {"continue_answers": "all", "tokenizer_deadline_ms": PATIENT_MS}
        client = await stack.enter_async_context(running_proxy(valkey_url, **settings))
        undisturbed = await read_stream(client, "/v1/chat/completions", body)
        for after in range(3, undisturbed.count(b"\n\n")):
            script.after, script.asked = [after], []
            found = await read_stream(client, "/v1/chat/completions", body)
            counted = (await status(client))["proxy"]["continued"]
            assert thoughts(found) == thoughts(undisturbed), (after, script.asked, counted)
            assert script.asked[1:] in ([], [path])
        assert counted["resumed"] >= 10


@pytest.mark.parametrize("strips", [True, False])
async def test_the_white_space_at_the_end_of_reasoning_is_not_guessed(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, strips: bool
) -> None:
    """Events of several tokens may not show what the parser does with it; any complete answer in the pool does."""
    monkeypatch.setattr(RetryBudget, "take", lambda _: True)
    exact = ExactEngine([*THOUGHT, END, *WORDS], opened=True, strips=strips, parts=(2, 3))
    script = ThinkingEngine(exact)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for worker_id in ("w0", "w1", "w2"):
            engine = await stack.enter_async_context(faulty_engine(script.answer))
            await fleet.report(worker_id, engine.url)
        settings = {"continue_answers": "all", "tokenizer_deadline_ms": PATIENT_MS}
        client = await stack.enter_async_context(running_proxy(valkey_url, **settings))

        async def ask(*after: int) -> bytes:
            script.after = [*after]
            return await read_stream(client, "/v1/chat/completions", {**BODY, **USAGE})

        assert b'data: {"error": ' in await ask(3)
        counted = (await status(client))["proxy"]["continued"]
        assert (counted["reasoning"], counted["resumed"]) == (1, 0)
        undisturbed = thoughts(await ask())
        assert undisturbed[0] == "".join(THOUGHT)[: -1 if strips else None]
        assert thoughts(await ask(3)) == undisturbed
        assert (await status(client))["proxy"]["continued"]["resumed"] == 1
