"""One request through the proxy: a worker is found, asked, and its answer passed on while it comes.

Until the first byte of an answer is there nothing was sent to the client, so the request goes to another worker where
one is full or away. Each try's booking ends with the try.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from opentelemetry.trace import Span
from starlette.types import Message, Receive, Send

from kvatlas.errors import InvalidValue, Unreachable
from router_client.decision.picker import Booked, Picker, Shed
from router_client.errors import NoWorkers
from router_client.learning.timings import Timings
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt
from router_client.proxy.counters import ProxyCounters
from router_client.proxy.event_stream import EventStream
from router_client.proxy.headers import RawHeaders, decision, for_client, for_engine
from router_client.proxy.request_reader import RequestReader, UnknownModel
from router_client.proxy.tracing import describe_answer, describe_try, handed_on, request_span
from router_client.proxy.upstream import (
    Answer,
    EngineLost,
    EngineRefused,
    EngineUnreachable,
    Question,
    StreamedAnswer,
    WholeAnswer,
    ask,
)
from router_client.tokens.prompt_reader import ReadRequest
from router_client.tokens.text_request import TextRequest
from router_client.tokens.usage import Usage

SHUN_S = 2.0
"""How long a worker that did not answer is avoided: until then its index record tells that it is down."""

_log = logging.getLogger("router_client.proxy")
_ASK_USAGE = b'{"stream_options":{"include_usage":true},'


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """`most_attempts`: workers tried for one request. `ask_usage`: let streams tell their usage to the proxy. `sheds`:
    refuse a request where that is the advice."""

    most_attempts: int = 4
    ask_usage: bool = True
    sheds: bool = False


@dataclass(slots=True)
class Incoming:
    """A client's request, read to its end, and the way back to it."""

    request: TextRequest
    question: Question
    headers: RawHeaders
    receive: Receive
    send: Send
    began_ns: int = field(default_factory=time.perf_counter_ns)

    @property
    def request_id(self) -> str | None:
        return self._header(b"x-request-id")

    @property
    def session_id(self) -> str | None:
        return self._header(b"x-session-id")

    def _header(self, name: bytes) -> str | None:
        return next((value.decode("latin-1") for header, value in self.headers if header == name and value), None)


class Exchanges:
    """Runs requests; safe to share between tasks of one event loop."""

    def __init__(
        self,
        picker: Picker,
        reader: RequestReader,
        client: httpx.AsyncClient,
        counters: ProxyCounters,
        settings: ExchangeSettings | None = None,
    ) -> None:
        """The caller keeps the client, and closes it."""
        self._picker = picker
        self._reader = reader
        self._client = client
        self._counters = counters
        self._settings = settings or ExchangeSettings()
        self._shunned: dict[str, float] = {}

    async def run(self, incoming: Incoming) -> None:
        """Answer one request. A client that goes away cancels what runs for it, at the engine too."""
        self._counters.requests += 1
        answering = asyncio.ensure_future(self._answer(incoming))
        leaving = asyncio.ensure_future(_client_left(incoming.receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._counters.gone += 1
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
        if not answering.cancelled():
            answering.result()

    async def _answer(self, incoming: Incoming) -> None:
        with request_span(incoming.question.path, incoming.headers) as span:
            try:
                read = await self._reader.read(incoming.request, incoming.request_id)
            except UnknownModel as error:
                await self._refuse(incoming, span, 404, "NotFoundError", str(error))
                return
            except InvalidValue as error:
                await self._refuse(incoming, span, 400, "BadRequestError", str(error))
                return
            except Unreachable as error:
                await self._refuse(incoming, span, 503, "ServiceUnavailableError", str(error))
                return
            if read.prompt_tokens is None:
                self._counters.untokenized += 1
            if (session_id := incoming.session_id) is not None:
                read = replace(read, prompt=replace(read.prompt, session_id=session_id))
            await self._try_workers(incoming, read, span)

    async def _try_workers(self, incoming: Incoming, read: ReadRequest, span: Span) -> None:
        tried: set[str] = set()
        refused: WholeAnswer | None = None
        line = ""
        begun = False
        for attempt in range(1, self._settings.most_attempts + 1):
            worker_id = ""
            try:
                async with self._booked(read.prompt, tried) as booked:
                    worker_id = booked.worker_id
                    if self._settings.sheds and attempt == 1 and booked.advice == Advice.SHED:
                        raise Shed(booked.retry_after_s)
                    async with self._asked(incoming, booked) as answer:
                        describe_try(span, worker_id=worker_id, attempt=attempt, status=answer.status)
                        describe_answer(span, answer.status, worker_id)
                        begun = True
                        await self._pass_on(incoming, read, booked, attempt, answer)
                return
            except EngineRefused as error:
                self._counters.refused += 1
                refused, line = error.answer, str(error)
                describe_try(span, worker_id=worker_id, attempt=attempt, status=error.answer.status)
            except EngineUnreachable as error:
                self._counters.unreachable += 1
                line = str(error)
                self._shunned[worker_id] = time.monotonic() + SHUN_S
                _log.warning("worker %s: %s; trying another", worker_id, line)
                describe_try(span, worker_id=worker_id, attempt=attempt, status=None, note=line)
            except Shed as shed:
                self._counters.shed += 1
                describe_answer(span, 503, None)
                await send_error(incoming.send, 503, "ServiceUnavailableError", str(shed), shed.retry_after_s)
                return
            except EngineLost:
                return  # told already; the booking ended as failed
            except (NoWorkers, Unreachable) as error:
                if begun:  # only the booking could not be given back; it ends by itself
                    _log.warning("worker %s: %s", worker_id, error)
                    return
                line = line or str(error)
                break
            tried.add(worker_id)
        self._counters.gave_up += 1
        if refused is not None:
            describe_answer(span, refused.status, None)
            await _send_whole(incoming.send, refused, ())
            return
        await self._refuse(incoming, span, 503, "ServiceUnavailableError", line)

    @asynccontextmanager
    async def _booked(self, prompt: Prompt, tried: set[str]) -> AsyncIterator[Booked]:
        """A worker that was not tried yet; those that did not answer lately come last."""
        now = time.monotonic()
        self._shunned = {worker_id: until for worker_id, until in self._shunned.items() if until > now}
        shunned = self._shunned.keys() - tried
        if shunned:
            try:
                entered = self._picker.route(prompt, tried | shunned)
                booked = await entered.__aenter__()
            except NoWorkers:
                pass  # none but shunned ones are left: better those than none
            else:
                async with _Leaving(entered):
                    yield booked
                return
        async with self._picker.route(prompt, tried) as booked:
            yield booked

    @asynccontextmanager
    async def _asked(self, incoming: Incoming, booked: Booked) -> AsyncIterator[Answer]:
        question = incoming.question
        if self._hides_usage(incoming.request):
            question = Question(question.path, question.query, _with_usage(incoming.request, question.body))
        headers = for_engine(incoming.headers, {**handed_on(), **booked.headers})
        self._counters.sent += 1
        self._counters.wait_us += (time.perf_counter_ns() - incoming.began_ns) // 1_000
        async with ask(self._client, booked.url, question, headers) as answer:
            yield answer

    async def _pass_on(
        self, incoming: Incoming, read: ReadRequest, booked: Booked, attempt: int, answer: Answer
    ) -> None:
        self._counters.answered += 1
        await _tell(booked.first_token())
        told = decision(booked, attempt=attempt, prompt_tokens=read.prompt_tokens)
        if isinstance(answer, WholeAnswer):
            usage = _of_one(incoming.request, _usage_of(answer))
            await _tell(booked.finish(usage, _timings(incoming.request, answer, usage)))
            await _send_whole(incoming.send, answer, (told,))
            return
        headers = [*for_client(answer.headers), told]
        await incoming.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        stream = EventStream(hide_usage=self._hides_usage(incoming.request))
        try:
            await self._pass_stream(incoming.send, answer, stream)
        except EngineLost as error:
            self._counters.broken += 1
            _log.warning("worker %s: %s", booked.worker_id, error)
            # the status is sent already: an error event is the only way to say so
            event = b"data: " + json.dumps(_error(502, "BadGatewayError", str(error))).encode() + b"\n\n"
            await incoming.send({"type": "http.response.body", "body": event})
            raise
        usage = _of_one(incoming.request, stream.usage)
        await _tell(booked.finish(usage, _timings(incoming.request, answer, usage)))

    async def _pass_stream(self, send: Send, answer: StreamedAnswer, stream: EventStream) -> None:
        async for chunk in answer.chunks():
            if passed := stream.feed(chunk):
                await send({"type": "http.response.body", "body": passed, "more_body": True})
        await send({"type": "http.response.body", "body": stream.end()})

    def _hides_usage(self, request: TextRequest) -> bool:
        return self._settings.ask_usage and request.streamed and not request.wants_usage

    async def _refuse(self, incoming: Incoming, span: Span, status: int, kind: str, line: str) -> None:
        describe_answer(span, status, None)
        await send_error(incoming.send, status, kind, line)


class _Leaving:
    """Leaves a context manager that was entered by hand."""

    def __init__(self, entered: Any) -> None:
        self._entered = entered

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: Any) -> bool | None:
        left: bool | None = await self._entered.__aexit__(*error)
        return left


async def send_error(send: Send, status: int, kind: str, line: str, retry_after_s: int = 1) -> None:
    """An error as OpenAI's API words it."""
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    await _send_whole(send, WholeAnswer(status, headers, json.dumps(_error(status, kind, line)).encode()), ())


async def _send_whole(send: Send, answer: WholeAnswer, added: RawHeaders) -> None:
    length = (b"content-length", str(len(answer.body)).encode())
    start: Message = {
        "type": "http.response.start",
        "status": answer.status,
        "headers": [*for_client(answer.headers), length, *added],
    }
    await send(start)
    await send({"type": "http.response.body", "body": answer.body})


async def _tell(telling: Awaitable[None]) -> None:
    """Tell the other routers, if the store answers: a request doesn't wait or fail for it."""
    try:
        await telling
    except Unreachable as error:
        _log.warning("%s", error)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_usage(request: TextRequest, body: bytes) -> bytes:
    """The body with the wish for usage at a stream's end."""
    options = request.body.get("stream_options")
    if options is None and "stream_options" not in request.body:
        at = body.index(b"{") + 1  # a long body is not written anew for this
        return _ASK_USAGE + body[at:]
    told: dict[str, Any] = {**request.body, "stream_options": {**(options or {}), "include_usage": True}}
    return json.dumps(told).encode()


def _of_one(request: TextRequest, usage: Usage | None) -> Usage | None:
    """A usage that is of the prompt that was routed: nothing can be compared with, or learned from, one of several."""
    return usage if request.prompts == 1 else None


def _timings(request: TextRequest, answer: Answer, usage: Usage | None) -> Timings | None:
    """None where its tokens are of several answers."""
    if usage is None or request.choices > 1:
        return None
    return answer.clock.timings(usage.completion_tokens)


def _usage_of(answer: WholeAnswer) -> Usage | None:
    if answer.status != 200 or b'"usage"' not in answer.body:
        return None
    try:
        return Usage.of(json.loads(answer.body))
    except ValueError:
        return None


def _error(status: int, kind: str, line: str) -> Mapping[str, Any]:
    return {"error": {"message": line, "type": kind, "param": None, "code": status}}
