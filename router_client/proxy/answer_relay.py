"""One try of a request on one engine: the engine is sent the request, and its answer is passed on while it comes."""

import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import Send

from kvatlas.errors import Unreachable
from router_client.learning.timings import Timings
from router_client.proxy.client_request import ClientRequest, error_body, send_answer
from router_client.proxy.counters import ProxyCounters
from router_client.proxy.engine_addresses import AddressPolicy
from router_client.proxy.event_stream import EventStream
from router_client.proxy.headers import decision_header, for_client, for_engine
from router_client.proxy.tracing import trace_headers
from router_client.proxy.upstream import (
    Answer,
    EngineLost,
    EngineRequest,
    StreamedAnswer,
    WholeAnswer,
    send_to_engine,
)
from router_client.results import Choice
from router_client.tokens.text_request import TextRequest
from router_client.tokens.usage import Usage

_log = logging.getLogger("router_client.proxy")
_ASK_USAGE = b'{"stream_options":{"include_usage":true},'


class AnswerRelay:
    """Relays answers and reports them to the router client; safe to share between tasks of one event loop."""

    def __init__(
        self, engines: httpx.AsyncClient, counters: ProxyCounters, addresses: AddressPolicy, *, ask_usage: bool
    ) -> None:
        """`ask_usage`: let streams report their usage to the proxy. The caller keeps `engines`, and closes it."""
        self._engines = engines
        self._counters = counters
        self._addresses = addresses
        self._ask_usage = ask_usage

    @asynccontextmanager
    async def send(self, request: ClientRequest, choice: Choice) -> AsyncIterator[Answer]:
        """Send a request to the chosen engine; see `send_to_engine`."""
        to_engine = request.for_engine
        if self._hides_usage(request.text):
            body = _body_with_usage(request.text, to_engine.body)
            to_engine = EngineRequest(to_engine.path, to_engine.query, body)
        credentials = self._addresses.sends_credentials(choice.url)
        headers = for_engine(request.headers, {**trace_headers(), **choice.headers}, credentials=credentials)
        self._counters.sent += 1
        self._counters.wait_us += (time.perf_counter_ns() - request.began_ns) // 1_000
        async with send_to_engine(self._engines, choice.url, to_engine, headers) as answer:
            yield answer

    async def pass_on(
        self, request: ClientRequest, prompt_tokens: int | None, choice: Choice, attempt: int, answer: Answer
    ) -> None:
        """Send the answer to the client. Raises EngineLost if the engine goes away in mid-answer; the client knows by then."""
        self._counters.answered += 1
        await _report(choice.first_token())
        header = decision_header(choice, attempt=attempt, prompt_tokens=prompt_tokens)
        if isinstance(answer, WholeAnswer):
            usage = _usage_of_one_prompt(request.text, _usage_of(answer))
            await _report(choice.finish(usage, _timings(request.text, answer, usage)))
            await send_answer(request.send, answer, (header,))
            return
        headers = [*for_client(answer.headers), header]
        await request.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        stream = EventStream(hide_usage=self._hides_usage(request.text))
        try:
            await _pass_stream(request.send, answer, stream)
        except EngineLost as error:
            self._counters.broken += 1
            _log.warning("worker %s: %s; telling the client in an error event", choice.worker_id, error)
            # the status is sent already: an error event is the only way to say so
            event = b"data: " + json.dumps(error_body(502, "BadGatewayError", str(error))).encode() + b"\n\n"
            await request.send({"type": "http.response.body", "body": event})
            raise
        usage = _usage_of_one_prompt(request.text, stream.usage)
        await _report(choice.finish(usage, _timings(request.text, answer, usage)))

    def _hides_usage(self, text: TextRequest) -> bool:
        return self._ask_usage and text.streamed and not text.wants_usage


async def _pass_stream(send: Send, answer: StreamedAnswer, stream: EventStream) -> None:
    async for chunk in answer.chunks():
        if passed := stream.feed(chunk):
            await send({"type": "http.response.body", "body": passed, "more_body": True})
    await send({"type": "http.response.body", "body": stream.end()})


async def _report(call: Awaitable[None]) -> None:
    """Report to the other routers if the store answers: a request doesn't wait or fail for it."""
    try:
        await call
    except Unreachable as error:
        _log.warning("request not reported to the other routers: %s", error)


def _body_with_usage(text: TextRequest, body: bytes) -> bytes:
    """The body, with the wish for usage at the stream's end."""
    options = text.body.get("stream_options")
    if options is None and "stream_options" not in text.body:
        at = body.index(b"{") + 1  # a long body is not serialized again for this
        return _ASK_USAGE + body[at:]
    changed: dict[str, Any] = {**text.body, "stream_options": {**(options or {}), "include_usage": True}}
    return json.dumps(changed).encode()


def _usage_of_one_prompt(text: TextRequest, usage: Usage | None) -> Usage | None:
    """None for several prompts: only the first was routed, so nothing can be compared or learned."""
    return usage if text.prompts == 1 else None


def _timings(text: TextRequest, answer: Answer, usage: Usage | None) -> Timings | None:
    """None if the tokens are those of several answers."""
    if usage is None or text.choices > 1:
        return None
    return answer.clock.timings(usage.completion_tokens)


def _usage_of(answer: WholeAnswer) -> Usage | None:
    if answer.status != 200 or b'"usage"' not in answer.body:
        return None
    try:
        return Usage.of(json.loads(answer.body))
    except ValueError:
        return None
