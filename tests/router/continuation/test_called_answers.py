"""Engines die in the middle of a tool call: another one's tokens continue it, and its parser reads them."""

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvatlas.fleet.records import EngineKind
from kvatlas.store.connection import Store
from kvatlas_router.continuation.parsed_answer import ParsedAnswer
from kvatlas_router.continuation.rest_request import counting_fields
from kvatlas_router.continuation.seam import Seam
from kvatlas_router.ejection.retry_budget import RetryBudget
from kvatlas_router.proxy import continued_answer
from kvatlas_router.proxy.continued_answer import ContinuedAnswer
from kvatlas_router.proxy.counters import ContinuationCounters
from kvatlas_router.tokens.text_request import Api, TextRequest
from tests.router.continuation.exact_engine import CALL, END, END_CALL, PROMPT, START, ExactEngine
from tests.router.continuation.mortal_engine import read_stream
from tests.router.continuation.test_continued_streams import TOOL
from tests.router.proxy.engines import MODEL, PATIENT_MS, running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine
from tests.router.proxy.test_proxy import status

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS, DERENDER = "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/derender"
FIRST_CALL = (CALL, "look", '{"who": ', '"w1', '"}', END_CALL)
ANSWER = ("Let", " me", *FIRST_CALL, CALL, "look", "{", '"who": "w2"', "}", END_CALL, " Well.", "")
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Say"}], "tools": [TOOL], "stream": True}
USAGE = {"stream_options": {"include_usage": True}, "temperature": 0, "max_tokens": 99}


class CallingEngine:
    """The next streams of its fleet each end after the number of events in `after`. `asked`: the paths of streams, and of
    calls to the parser. `parse` and `sampling`: what its parser answers, and how it renders the request."""

    def __init__(self, engine: ExactEngine) -> None:
        self.engine = engine
        self.after: list[int] = []
        self.asked: list[str] = []
        self.parse: Callable[[dict[str, Any]], dict[str, Any] | None] = engine.parse
        self.sampling: dict[str, Any] = {}

    async def answer(self, request: Request) -> Response:
        path, body = request.url.path, json.loads(await request.body() or b"{}")
        if path == f"{CHAT}/render":
            return JSONResponse({"token_ids": self._prompt(body), "sampling_params": self.sampling})
        if path == "/tokenize":
            return JSONResponse({"tokens": self._prompt(body) if "messages" in body else list(body["prompt"].encode())})
        self.asked.append(path)
        if path == DERENDER:
            parsed = self.parse(body)
            return JSONResponse({"error": "not here"}, 404) if parsed is None else JSONResponse(parsed)
        if "messages" in body:
            body["prompt"] = self._prompt(body)
        return StreamingResponse(self._stream(self.engine.stream(body)), media_type="text/event-stream")

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        last = body["messages"][-1]
        sent = last["content"] if last["role"] == "assistant" else ""
        tokens = self.engine.tokens
        at = next(at for at in range(len(tokens) + 1) if "".join(tokens[:at]) == sent)
        return [*PROMPT, *self.engine.ids[:at]]

    async def _stream(self, events: list[bytes]) -> AsyncIterator[bytes]:
        after = self.after.pop(0) if self.after else len(events)
        for event in events[:after]:
            yield event
        if after < len(events):
            raise ConnectionResetError


@asynccontextmanager
async def calling_fleet(store: Store, valkey_url: str, script: CallingEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for worker_id in ("w0", "w1", "w2"):
            engine = await stack.enter_async_context(faulty_engine(script.answer))
            await fleet.report(worker_id, engine.url)
        settings = {"continue_answers": "all", "tokenizer_deadline_ms": PATIENT_MS}
        yield await stack.enter_async_context(running_proxy(valkey_url, **settings))


@pytest.fixture
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryBudget, "take", lambda _: True)


def said(raw: bytes) -> dict[str, Any]:
    """What the client reads, however the stream is cut into events."""
    events = [json.loads(one) for one in re.findall(rb"^data: (\{.*)$", raw, re.M)]
    choices = [choice for event in events for choice in event.get("choices", ())]
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        whole = calls.setdefault(call["index"], {"ids": 0, "name": "", "arguments": ""})
        whole["ids"] += "id" in call
        for name, text in call["function"].items():
            whole[name] += text
    shared = ("id", "object", "created", "model")
    return {
        "calls": calls,
        "text": "".join(choice["delta"].get("content") or "" for choice in choices),
        "reasoning": "".join(choice["delta"].get("reasoning") or "" for choice in choices),
        "ids": [id for choice in choices for id in choice.get("token_ids") or ()],
        "finish": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "usages": [event["usage"] for event in events if event.get("usage") and not event["choices"]],
        "streams": len({tuple(map(event.get, shared)) for event in events}),
        "end": raw[-14:],
    }


@pytest.mark.parametrize(
    ("tokens", "parts", "more"),
    [
        (ANSWER, (1,), {}),
        (ANSWER, (2, 3), {}),
        (ANSWER, (2, 3), {"max_tokens": 9, "stream_options": None}),
        (FIRST_CALL, (1,), {"return_token_ids": True}),
        ((START, "Hm", ".", END, *FIRST_CALL), (1,), {}),
    ],
)
async def test_a_call_goes_on_after_each_event(
    store: Store,
    valkey_url: str,
    monkeypatch: pytest.MonkeyPatch,
    no_budget: None,
    tokens: tuple[str, ...],
    parts: tuple[int, ...],
    more: dict[str, Any],
) -> None:
    monkeypatch.setattr(continued_answer, "PARSE_PAUSE", 0)
    engine = ExactEngine(tokens, parts=parts, reason="stop")
    script, body = CallingEngine(engine), {**BODY, **USAGE, **more}
    async with calling_fleet(store, valkey_url, script) as client:
        undisturbed = said(await read_stream(client, CHAT, body))
        events = engine.stream({**body, **USAGE, "prompt": PROMPT, "return_token_ids": True})
        begun = next(at for at, event in enumerate(events, 1) if b'"tool_calls":[' in event)
        for after in range(begun, len(events)):
            ended = b'"finish_reason":null' not in events[after - 1]  # a second death before the usage is one too many
            for again in [[]] if ended else [[], [1]] if parts == (1,) else [[2]]:
                script.after, script.asked = [after, *again], []
                found = said(await read_stream(client, CHAT, body))
                assert found == undisturbed, (after, again, script.asked)
                assert script.asked[1:2] in ([], [COMPLETIONS])
        counted = (await status(client))["proxy"]["continued"]
        assert counted["resumed"] >= 2 and not any(counted[why] for why in counted if why != "resumed")


async def test_a_call_begun_by_a_second_engine_goes_on_at_a_third(
    store: Store, valkey_url: str, no_budget: None
) -> None:
    """The second one continues the text as a chat, so the third one gets its prompt and its tokens."""
    script = CallingEngine(ExactEngine(ANSWER, reason="stop"))
    async with calling_fleet(store, valkey_url, script) as client:
        undisturbed = said(await read_stream(client, CHAT, {**BODY, **USAGE}))
        for again in range(3, 16):
            script.after, script.asked = [3, again], []
            assert said(await read_stream(client, CHAT, {**BODY, **USAGE})) == undisturbed, (again, script.asked)
            streams = [path for path in script.asked if path != DERENDER]
            assert streams == [CHAT, CHAT, COMPLETIONS], again


async def test_an_engine_that_dies_while_it_parses_is_replaced(store: Store, valkey_url: str, no_budget: None) -> None:
    script = CallingEngine(ExactEngine(ANSWER, reason="stop"))
    last = [True]

    def parse(body: dict[str, Any]) -> dict[str, Any]:
        if body["generate_chunk"]["choices"][0]["finish_reason"] and last:
            last.pop()
            raise ConnectionResetError
        return script.engine.parse(body)

    async with calling_fleet(store, valkey_url, script) as client:
        undisturbed = said(await read_stream(client, CHAT, {**BODY, **USAGE}))
        script.after, script.parse = [7], parse
        assert said(await read_stream(client, CHAT, {**BODY, **USAGE})) == undisturbed and not last
        assert (await status(client))["proxy"]["continued"]["resumed"] == 2


@pytest.mark.parametrize(("pause", "asked"), [(0, 15), (1e9, 2)])
async def test_parsing_takes_a_small_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch, pause: float, asked: int
) -> None:
    """A parser gets one event's tokens, or those that arrived during `pause` times the duration of a parse."""
    monkeypatch.setattr(continued_answer, "PARSE_PAUSE", pause)
    engine = ExactEngine([*FIRST_CALL[:3], *"many letters", '"}', END_CALL], reason="stop")
    text = TextRequest.of(Api.CHAT, {**BODY, **USAGE})
    seam = Seam(text, parsed=ParsedAnswer(text))
    asks = list[str]()

    async def ask(path: str, body: Mapping[str, Any]) -> Any:
        asks.append(path)
        return engine.parse({**body})

    answer = ContinuedAnswer(None, ContinuationCounters(), None, None, seam=seam)  # type: ignore[arg-type]
    fields = counting_fields(text, EngineKind.VLLM, len(PROMPT))
    got = b"".join([await answer.feed(event, ask) for event in engine.stream({**text.body, **fields})[:3]])
    rest = seam.rest()
    body = seam.builder.body(rest, rest.tokens)
    seam.resume(rest, rest.tokens)
    got += b"".join([await answer.feed(event, ask) for event in engine.stream({**body, **fields})])
    undisturbed = b"".join(engine.stream({**text.body, "return_token_ids": True}))
    assert {**said(got), "ids": []} == {**said(undisturbed), "ids": []}
    assert asks == [DERENDER] * asked


TEXT = {"chunk": {"choices": [{"index": 0, "delta": {"content": "{"}, "finish_reason": None}]}}
LATE_THOUGHT = {"chunk": {"choices": [{"index": 0, "delta": {"reasoning": "Hm"}, "finish_reason": None}]}}


@pytest.mark.parametrize(
    ("parsed", "sampling", "more", "why"),
    [
        ([None], {}, {}, "tool_call"),
        ([TEXT], {}, {}, "tool_call"),
        ([..., LATE_THOUGHT], {}, {}, "tool_call"),
        ([..., {}], {}, {}, "tool_call"),
        ([], {"structured_outputs": {"structural_tag": "{}"}}, {}, "guided"),
        ([], {}, {"stop": "zzz"}, "tool_call"),
        ([], {}, {"logprobs": True}, "tool_call"),
    ],
)
async def test_a_call_ends_with_an_error_if_the_next_engine_cannot_parse_it(
    store: Store,
    valkey_url: str,
    no_budget: None,
    parsed: list[Any],
    sampling: dict[str, Any],
    more: dict[str, Any],
    why: str,
) -> None:
    """It has no parser, a different one, or one that reads something impossible; or a grammar guides the call; or no ids are
    known, or the client gets more of a token than its id."""
    script = CallingEngine(ExactEngine(ANSWER, reason="stop"))
    script.sampling = sampling

    def parse(body: dict[str, Any]) -> dict[str, Any] | None:
        next_one = parsed.pop(0) if parsed else ...
        return script.engine.parse(body) if next_one is ... else next_one

    async with calling_fleet(store, valkey_url, script) as client:
        script.after, script.parse = [8], parse
        raw = await read_stream(client, CHAT, {**BODY, **USAGE, **more})
        assert b'data: {"error": ' in raw and not parsed
        counted = (await status(client))["proxy"]["continued"]
        assert [name for name, number in counted.items() if number and name != "resumed"] == [why]
