"""One try of a request on one engine: the engine is sent the request, and its answer is passed on while it comes."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx

from kvatlas.errors import Unreachable
from kvatlas.telemetry import sampled_context
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.disaggregation.pair_sender import send_to_pair
from kvatlas_router.progress.monitor import ProgressMonitor
from kvatlas_router.proxy.answer_usage import timings_of, usage_fields, usage_of_body, usage_of_one_answer
from kvatlas_router.proxy.client_request import ClientRequest, ErrorKind, send_answer
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.event_stream import EventStream
from kvatlas_router.proxy.headers import for_client, for_engine
from kvatlas_router.proxy.predicted_try import sent_try
from kvatlas_router.proxy.request_trace import (
    describe_engine_answer,
    describe_first_token,
    describe_usage,
    engine_span,
    trace_headers,
)
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_answer import (
    Answer,
    EngineLost,
    EngineRequest,
    StreamedAnswer,
    WholeAnswer,
    send_to_engine,
)
from router_client.learning.usage import Usage
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.transfer_protocol import replace_fields
from router_client.results import Choice

_log = logging.getLogger("kvatlas_router.proxy")


class AnswerRelay:
    """Relays answers and reports them to the router client; safe to share between tasks of one event loop."""

    def __init__(
        self,
        engines: httpx.AsyncClient,
        progress: ProgressMonitor,
        counters: ProxyCounters,
        addresses: AddressPolicy,
        *,
        ask_usage: bool,
    ) -> None:
        """`ask_usage`: let streams report their usage to the proxy. The caller keeps `engines`, and closes it."""
        self._engines = engines
        self._progress = progress
        self._counters = counters
        self._addresses = addresses
        self._ask_usage = ask_usage

    @asynccontextmanager
    async def send(
        self, request: ClientRequest, choice: Booked, may_move: Callable[[frozenset[str]], bool]
    ) -> AsyncIterator[Answer]:
        """Send a request to the chosen engine, or to both of a pair; see `send_to_engine` and `send_to_pair`. `may_move`: see
        `SentTry`."""
        to_engine, text = request.for_engine, request.text
        self._counters.overhead.add((time.perf_counter_ns() - request.began_ns) / 1e9, span=sampled_context())
        self._counters.sent += 1
        fields: dict[str, Any] = {}
        if text is not None:
            fields = dict(usage_fields(text)) if self._hides_usage(request) else {}
        if isinstance(choice, PairChoice):
            assert text is not None
            self._counters.apart += 1
            send = partial(self._send, request, may_move)
            async with send_to_pair(choice, text.body, to_engine, fields, send) as answer:
                yield answer
            return
        if text is not None:
            to_engine = replace(to_engine, body=replace_fields(text.body, to_engine.body, fields))
        async with self._send(request, may_move, choice, to_engine) as answer:
            yield answer

    @asynccontextmanager
    async def _send(
        self,
        request: ClientRequest,
        may_move: Callable[[frozenset[str]], bool],
        choice: Choice,
        to_engine: EngineRequest,
    ) -> AsyncIterator[Answer]:
        credentials = self._addresses.sends_credentials(choice.url)
        with engine_span(to_engine, choice, request.model) as span:
            watch = self._progress.watch(sent_try(choice, to_engine.path, request.text, may_move))
            headers = for_engine(request.headers, {**trace_headers(span), **choice.headers}, credentials=credentials)
            async with send_to_engine(self._engines, watch, choice.url, to_engine, headers) as answer:
                describe_engine_answer(span, answer.status)
                yield replace(answer, span=span) if span.is_recording() else answer

    async def pass_on(
        self, request: ClientRequest, choice: Booked, header: tuple[bytes, bytes], answer: Answer
    ) -> None:
        """Send a good answer to the client. Raises EngineLost if the engine goes away in mid-answer."""
        if isinstance(answer, WholeAnswer):
            await _report(self._finish(request, choice, answer, usage_of_body(answer.body)))
            await send_answer(request.send, answer, (header,))
            return
        headers = [*for_client(answer.headers), header]
        await request.send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if answer.events:
            usage = await self._pass_events(request, choice, answer)
        else:
            usage = None
            await _report(choice.first_token())
            async for chunk in answer.chunks():
                await request.send({"type": "http.response.body", "body": chunk, "more_body": True})
            await request.send({"type": "http.response.body", "body": b""})
        await _report(self._finish(request, choice, answer, usage))

    async def break_off(self, request: ClientRequest, choice: Booked, error: EngineLost) -> None:
        """The engine went away in mid-answer: tell the client."""
        self._counters.broken += 1
        _log.warning("worker %s: %s; telling the client in an error event", choice.worker_id, error)
        await request.break_off(ErrorKind.BAD_GATEWAY, str(error))

    async def _finish(self, request: ClientRequest, choice: Booked, answer: Answer, usage: Usage | None) -> None:
        self._counters.request_time.add((time.perf_counter_ns() - request.began_ns) / 1e9, span=sampled_context())
        text = request.text
        if text is None:  # its prompt was not read: nothing can be compared or learned
            await choice.done()
            return
        usage = usage_of_one_answer(text, usage)
        describe_usage(answer.span, usage)
        await choice.done(answer.status, usage, timings_of(text, answer.clock, usage))

    async def _pass_events(self, request: ClientRequest, choice: Booked, answer: StreamedAnswer) -> Usage | None:
        stream = EventStream(hide_usage=self._hides_usage(request))
        async for chunk in answer.chunks():
            before = stream.parts
            passed = stream.feed(chunk)
            if stream.parts > before:
                answer.clock.part(stream.parts - before)
                if not before:
                    ttft_s = (time.perf_counter_ns() - request.began_ns) / 1e9
                    self._counters.ttft.add(ttft_s, span=sampled_context())
                    describe_first_token(answer.span, ttft_s)
                    await _report(choice.first_token())
            if stream.done:
                request.complete = True  # OpenAI's client leaves as soon as it has that event
            if passed:
                await request.send({"type": "http.response.body", "body": passed, "more_body": True})
        await request.send({"type": "http.response.body", "body": stream.end()})
        return stream.usage

    def _hides_usage(self, request: ClientRequest) -> bool:
        text = request.text
        return text is not None and self._ask_usage and text.streamed and not text.wants_usage


async def _report(call: Awaitable[None]) -> None:
    """Report to the other routers if the store answers: a request doesn't wait or fail for it."""
    try:
        await call
    except Unreachable as error:
        _log.warning("request not reported to the other routers: %s", error)
