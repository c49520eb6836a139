"""Engines that hang up: before the first byte nothing is lost; after it, the client gets an error event."""

import json

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from kvatlas.store.connection import Store
from kvatlas_router.proxy import answer_relay
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router.proxy.raw_engine import HEAD, chunk, raw_engine, read_cut, silent_engine
from tests.router.proxy.test_proxy import PROMPT, decision, status

pytestmark = pytest.mark.anyio

EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
LENGTH = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    "before_the_first_byte",
    [
        b"",
        b"HTTP/1.1 200",
        HEAD,
        LENGTH + b'{"choices"',
        b"HTTP/1.1 600 Odd\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nthere",
    ],
    ids=["nothing", "half", "head", "cut", "no status", "two lengths"],
)
async def test_a_request_lost_before_the_first_byte_goes_to_another_engine(
    store: Store, valkey_url: str, caplog: pytest.LogCaptureFixture, before_the_first_byte: bytes
) -> None:
    async with (
        raw_engine(before_the_first_byte) as rude,
        running_fleet(store, {"w1": {}}, {"w2": {"url": rude.url}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w2", PROMPT)
        for streamed in (True, False):
            body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": streamed}
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200 and decision(answer)[0] == "w1"
        assert len(rude.heads) == 1
        counted = (await status(client))["proxy"]
        assert (counted["unreachable"], counted["answered"], counted["broken"]) == (1, 2, 0)
        assert not any("\n" in line for line in caplog.messages)


async def test_an_answer_lost_in_the_middle_ends_with_an_error_event(store: Store, valkey_url: str) -> None:
    async with (
        raw_engine(HEAD + chunk(EVENT)) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.headers["x-engine"] == "raw"
        assert answer.text.startswith(EVENT.decode() + 'data: {"error": ') and "mid-answer" in answer.text
        assert (await status(client))["proxy"]["broken"] == 1


async def test_an_answer_lost_in_the_middle_of_an_event_is_cut(store: Store, valkey_url: str) -> None:
    """No error event could follow half an event."""
    async with (
        raw_engine(HEAD + chunk(EVENT) + chunk(EVENT[:15])) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        body = {"model": MODEL, "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
        assert await read_cut(client, "/v1/completions", body) == EVENT + EVENT[:15]


UNTIL_CLOSED = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n"


@pytest.mark.parametrize("ended_cleanly", [False, True], ids=["with its connection", "cleanly"])
async def test_a_stream_that_ends_is_whole_only_with_its_last_event(
    store: Store, valkey_url: str, ended_cleanly: bool
) -> None:
    """A process between the router and a lost engine may end the stream cleanly."""
    for events, ending in {
        EVENT + b"data: [DONE]": "[DONE]",
        EVENT.replace(b"}]}", b', "finish_reason": "stop"}]}'): "stop",
        EVENT.replace(b"}]}", b', "finish_reason": "stop"}]}') + b'data: {"seconds": 2}': "seconds",
        EVENT: "before the answer",
        EVENT + EVENT[:15]: None,
        b": ping\n\n": "without an event",
    }.items():
        stream = HEAD + chunk(events) + b"0\r\n\r\n" if ended_cleanly else UNTIL_CLOSED % b"text/event-stream" + events
        async with (
            raw_engine(stream) as rude,
            running_fleet(store, {}, {"w1": {"url": rude.url}}),
            running_proxy(valkey_url) as client,
        ):
            body = {"model": MODEL, "prompt": PROMPT, "stream": True, "stream_options": {"include_usage": True}}
            if ending is None:
                assert await read_cut(client, "/v1/completions", body) == events
            else:
                text = (await client.post("/v1/completions", json=body)).text
                assert text.startswith(events.decode()) and ending in text[-200:], text


@pytest.mark.parametrize("in_pieces", [False, True])
async def test_an_engine_that_dies_behind_its_final_event_has_answered(
    store: Store, valkey_url: str, in_pieces: bool
) -> None:
    events = (EVENT, b"data: [DONE]\n\n")
    body = {"model": MODEL, "prompt": PROMPT, "stream": True}
    async with (
        raw_engine(HEAD + (b"".join(map(chunk, events)) if in_pieces else chunk(b"".join(events)))) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        assert (await client.post("/v1/completions", json=body)).content == b"".join(events)
        counted = await status(client)
        assert (counted["proxy"]["answered"], counted["proxy"]["broken"]) == (1, 0)
        assert (counted["outliers"]["bad"], counted["outliers"]["good"]) == (0, 1)


@pytest.mark.parametrize("continues", ["off", "all"])
async def test_an_answer_ends_soon_after_its_final_event(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, continues: str
) -> None:
    """Even if its engine keeps the connection open and sends nothing more."""
    monkeypatch.setattr(answer_relay, "END_S", 0.1)
    events = EVENT + b"data: [DONE]\n\n"
    async with (
        silent_engine(HEAD + chunk(events)) as silent,
        running_fleet(store, {}, {"w1": {"url": silent.url}}),
        running_proxy(valkey_url, continue_answers=continues) as client,
    ):
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        assert (await client.post("/v1/completions", json=body)).content == events
        counted = (await status(client))["proxy"]
        assert (counted["answered"], counted["broken"], counted["gone"]) == (1, 0, 0)


async def test_a_stream_of_two_choices_is_whole_only_with_both(store: Store, valkey_url: str) -> None:
    """The end of one choice says nothing about the other."""
    parts = [
        b'data: {"choices": [{"index": %d, "text": "a", "finish_reason": %b}]}\n\n' % (index, finish)
        for index, finish in ((0, b"null"), (1, b'"stop"'), (0, b"null"))
    ]
    body = {"model": MODEL, "prompt": PROMPT, "stream": True, "n": 2}
    async with (
        raw_engine(HEAD + b"".join(map(chunk, parts)) + b"0\r\n\r\n") as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        text = (await client.post("/v1/completions", json=body)).content
        assert text.startswith(b"".join(parts)) and b"before the answer" in text
        assert (await status(client))["proxy"]["broken"] == 1


async def test_an_answer_that_can_not_continue_is_whole_only_with_its_end(store: Store, valkey_url: str) -> None:
    """For example, one within a tool call."""
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a'}}
    event = {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]}
    part = b"data: " + json.dumps(event).encode() + b"\n\n"
    async with (
        raw_engine(HEAD + chunk(part) + chunk(part) + b"0\r\n\r\n") as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url, continue_answers="all") as client,
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True}
        text = (await client.post("/v1/chat/completions", json=body)).content
        assert text.startswith(part + part) and b"before the answer" in text
        assert (await status(client))["proxy"]["broken"] == 1


async def test_json_that_is_cut_where_its_connection_ends_is_tried_elsewhere(store: Store, valkey_url: str) -> None:
    async with (
        raw_engine(UNTIL_CLOSED % b"application/json" + b'{"id": "c", "choi') as rude,
        running_fleet(store, {"w2": {}}, {"w1": {"url": rude.url}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w1", PROMPT)
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2})
        assert answer.status_code == 200 and answer.json()["choices"] and decision(answer)[0] == "w2"
        assert rude.heads and (await status(client))["proxy"]["retried"] == 1


async def test_the_beginning_of_an_event_that_may_be_a_usage_is_not_sent(store: Store, valkey_url: str) -> None:
    async with (
        raw_engine(HEAD + chunk(EVENT) + chunk(EVENT[:15])) as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT, "stream": True})
        events = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")]
        assert [event.keys() for event in events] == [{"choices"}, {"error"}]


@pytest.mark.parametrize("first", [b"", HEAD + chunk(EVENT)], ids=["before the first byte", "in mid-answer"])
async def test_an_engine_that_hangs_is_noticed(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    shorten_bounds(monkeypatch)
    async with (
        silent_engine(first) as silent,
        running_fleet(store, {"w2": {}}, {"w1": {"url": silent.url}}) as fleet,
        running_proxy(valkey_url) as client,
    ):
        await fleet.holds("w1", PROMPT)
        body = {"model": MODEL, "prompt": PROMPT, "stream": True, "max_tokens": 2}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        if first:
            assert "the engine hangs mid-answer" in answer.text
        else:
            assert decision(answer)[0] == "w2" and answer.text.endswith("data: [DONE]\n\n")


async def test_the_callers_trace_continues_to_the_engine_through_the_proxys_span(
    store: Store, valkey_url: str, spans: InMemorySpanExporter
) -> None:
    async with (
        raw_engine(HEAD + chunk(EVENT) + b"0\r\n\r\n") as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url, credentials_to="127.0.0.1") as client,
    ):
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "r1", "authorization": "Bearer key"}
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        assert (await client.post("/v1/completions?a=b", json=body, headers=headers)).status_code == 200
    sent, own = [span for span in spans.get_finished_spans() if span.name == "POST /v1/completions"]
    assert (sent.kind, own.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert sent.context is not None and sent.parent is not None
    (route,) = [span for span in spans.get_finished_spans() if span.name == "route kvatlas"]
    assert own.context is not None and own.parent is not None and route.parent is not None
    assert (f"{own.context.trace_id:032x}", f"{own.parent.span_id:016x}") == (TRACE, SPAN)
    assert route.parent.span_id == own.context.span_id and own.attributes is not None
    assert own.attributes["kvatlas.worker"] == "w1" and own.attributes["http.response.status_code"] == 200
    (head,) = rude.heads
    lines = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head.splitlines()}
    assert sent.parent.span_id == own.context.span_id
    assert lines["traceparent"] == f"00-{TRACE}-{sent.context.span_id:016x}-01"
    assert sent.attributes is not None and sent.attributes["server.port"] == int(rude.url.rpartition(":")[2])
    assert any(event.name == "first token" for event in sent.events)
    assert (lines["authorization"], lines["accept-encoding"]) == ("Bearer key", "identity")
    assert head.startswith("POST /v1/completions?a=b ") and lines["host"] == rude.url.removeprefix("http://")


async def test_without_tracing_the_callers_own_context_is_forwarded(store: Store, valkey_url: str) -> None:
    async with (
        raw_engine(HEAD + chunk(EVENT) + b"0\r\n\r\n") as rude,
        running_fleet(store, {}, {"w1": {"url": rude.url}}),
        running_proxy(valkey_url) as client,
    ):
        body = {"model": MODEL, "prompt": PROMPT, "stream": True}
        traceparent = f"00-{TRACE}-{SPAN}-01"
        await client.post("/v1/completions", json=body, headers={"traceparent": traceparent})
    assert f"traceparent: {traceparent}\r\n" in rude.heads[0].lower()
