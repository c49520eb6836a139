"""One attempt at a request, on one engine: sends the request and passes the answer on as it arrives."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from kvatlas.dataclass import dataclass, replace
from kvatlas.errors import KvatlasError, Unreachable
from kvatlas.fleet.records import EngineKind
from kvatlas.telemetry import sampled_context
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.error_events import is_seen
from kvatlas_router.answers.event_stream import MOST_WHOLE_BYTES, EventStream
from kvatlas_router.disaggregation.kv_sources import fetch_fields
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.disaggregation.pair_sender import send_to_pair
from kvatlas_router.engine_objects.object_holders import ObjectHolders
from kvatlas_router.progress.monitor import ProgressMonitor
from kvatlas_router.proxy.client_request import ClientRequest
from kvatlas_router.proxy.continued_answer import ContinuedAnswer
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.headers import for_engine
from kvatlas_router.proxy.predicted_attempt import sent_attempt
from kvatlas_router.proxy.reported_usage import timings_of, usage_fields, usage_of_body, usage_of_one_answer
from kvatlas_router.proxy.request_trace import (
    describe_first_token,
    describe_usage,
    engine_span,
    trace_headers,
)
from kvatlas_router.tokens.text_request import Api, TextRequest
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_answer import (
    Answer,
    EngineAttempt,
    EngineRequest,
    StreamedAnswer,
    WholeAnswer,
    error_refusal,
)
from kvatlas_router.upstream.engine_client import EngineAway, EngineClient, EngineLost
from router_client.learning.token_counts import Usage
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.engine_priority import engine_priority
from router_client.pricing.transfer_protocol import replace_fields
from router_client.results import Choice

_log = logging.getLogger("kvatlas_router.proxy")
END_S = 5.0
"""How long an engine that has sent the final event, or an error, may take to end its answer. If it does so in time, its
connection can be kept."""
MOST_EDITED_BYTES = 32 << 20
"""Size of the longest event for a client that may not see counts of cached tokens: the event must be read whole to
remove them."""
_WITH_PRIORITY = (Api.CHAT, Api.COMPLETIONS, Api.RESPONSES, Api.TOKENS)
"""The calls of vLLM that read a priority."""


class EngineFailed(KvatlasError):
    """An answer ended with an error that the engine reported in it. The client has received both."""

    def __init__(self, error: EngineError) -> None:
        super().__init__(f"it returned an error: {error.line}")
        self.status = error.status


class EventTooLong(KvatlasError):
    """An event is too long for a client that may not see counts of cached tokens. This is not the engine's fault."""

    def __init__(self) -> None:
        most = f"{MOST_EDITED_BYTES >> 20} MiB, the most that this key may get"
        super().__init__(f"an event of the answer is longer than {most}; ask for fewer log probabilities")


@dataclass(frozen=True, slots=True)
class OpenedAnswer:
    """An answer whose first content has arrived. `stream`: its reader, if it is a readable event stream; `passed`: the bytes to
    send first."""

    answer: Answer
    stream: EventStream | None = None
    passed: bytes = b""


class AnswerRelay:
    """Relays answers and reports them to the router client. Can be shared between tasks of one event loop."""

    def __init__(
        self,
        engines: EngineClient,
        progress: ProgressMonitor,
        counters: ProxyCounters,
        addresses: AddressPolicy,
        objects: ObjectHolders,
        *,
        ask_usage: bool,
        priorities: bool,
    ) -> None:
        """`ask_usage`: make streams report their usage to the proxy. `priorities`: send each request's priority to vLLM. The
        caller owns `engines` and closes it."""
        self._engines = engines
        self._progress = progress
        self._counters = counters
        self._addresses = addresses
        self._objects = objects
        self._ask_usage = ask_usage
        self._priorities = priorities

    def send(
        self,
        request: ClientRequest,
        choice: Booked,
        may_move: Callable[[frozenset[str], bool], bool],
        continued: ContinuedAnswer,
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a request to the chosen engine, or to both engines of a pair; see `EngineAttempt` and `send_to_pair`. The caller
        enters the result at once. `may_move`: see `SentAttempt`. `continued`: its answer, as far as it exists."""
        to_engine, text = request.for_engine, request.text
        if (rest := continued.next_request) is not None:
            text = rest
            to_engine = replace(to_engine, path=rest.api.value, body=json.dumps(rest.body).encode())
        self._counters.overhead.add((time.perf_counter_ns() - request.began_ns) / 1e9, span=sampled_context())
        self._counters.sent += 1
        fields: dict[str, Any] = {}
        if text is not None:
            fields = dict(usage_fields(text)) if self._hides_usage(request, continued) else {}
            fields |= continued.fields(text, _kind_of(choice))
        fetch = fetch_fields(choice, text.body) if text is not None else {}
        self._counters.fetching += bool(fetch)
        if isinstance(choice, PairChoice):
            assert text is not None
            self._counters.apart += 1
            send = partial(self._send, request, may_move)
            return send_to_pair(choice, text.body, to_engine, fields, fetch, send)
        if text is not None:
            if self._priorities and choice.kind is EngineKind.VLLM:
                fields |= _priority_field(request, text, choice)
            if fields or fetch:
                body = replace_fields(text.body, to_engine.body, {**fields, **fetch})
                to_engine = replace(to_engine, body=body)
        return self._send(request, may_move, choice, to_engine)

    def _send(
        self,
        request: ClientRequest,
        may_move: Callable[[frozenset[str], bool], bool],
        choice: Choice,
        to_engine: EngineRequest,
    ) -> EngineAttempt:
        span = engine_span(to_engine, choice, request.model)
        credentials = self._addresses.sends_credentials(choice.url)
        added = {**trace_headers(span), **choice.headers}
        headers = for_engine(request.headers, added, credentials=credentials, of_tenant=not request.is_trusted)
        sent = sent_attempt(choice, to_engine.path, request.text, may_move)
        watched = self._progress.send(sent, asyncio.current_task())
        return EngineAttempt(self._engines, watched, choice.url, to_engine, headers, span)

    async def open(
        self,
        request: ClientRequest,
        choice: Booked,
        header: tuple[bytes, bytes],
        answer: Answer,
        continued: ContinuedAnswer,
    ) -> "OpenedAnswer":
        """Read a successful answer up to its first content, or to its end. Until then, the client gets only bytes that keep
        the connection alive. Raises EngineRefused for an error in place of an answer, EventTooLong, or EngineLost if the
        engine disappears."""
        if isinstance(answer, WholeAnswer):
            if request.text is not None and not answer.body:
                raise EngineLost(f"{choice.url}: the answer is empty")
            if request.for_engine.method == "POST" and (error := EngineError.of_body(answer.body)) is not None:
                raise error_refusal(choice.url, error, answer)
            if request.objects is not None:
                await self._objects.record(
                    request.objects.made_by(answer.body), choice.worker_id, request.caller.tenant_id
                )
            return OpenedAnswer(answer)
        if not answer.events:
            return OpenedAnswer(answer)
        hides = self._hides_usage(request, continued)
        goes_on = continued.seam is not None
        text = continued.next_request or request.text
        choices = 1 if text is None else text.all_choices
        stream = EventStream(
            hide_usage=hides,
            hold=True,
            whole=goes_on or not request.shows_cached,
            most_whole=MOST_WHOLE_BYTES if request.shows_cached else MOST_EDITED_BYTES,
            counts=goes_on,
            choices=choices,
            ends_at_error=request.for_engine.path == Api.MESSAGES,  # a repeated error, if any, comes before their end
        )
        async for chunk in answer:
            passed = self._read(request, answer, stream, chunk)
            if stream.begun:
                if stream.response_id is not None and request.objects is not None and request.objects.kept:
                    await self._objects.record((stream.response_id,), choice.worker_id, request.caller.tenant_id)
                return OpenedAnswer(answer, stream, passed)
            if stream.error is not None:
                break
            if passed:
                if not request.events:
                    await request.begin(answer, header)
                await request.send_part(passed)
        rest = stream.end()
        if stream.error is not None:
            raise error_refusal(choice.url, stream.error, answer)
        if not stream.events:
            raise EngineLost(f"{choice.url}: the stream ended without an event")
        if (goes_on and not stream.done) or _is_cut(request, stream):
            raise EngineLost(f"{choice.url}: the stream ended before the answer was complete")
        return OpenedAnswer(answer, stream, rest)

    async def begin(
        self,
        request: ClientRequest,
        choice: Booked,
        header: tuple[bytes, bytes],
        opened: "OpenedAnswer",
        continued: ContinuedAnswer,
    ) -> None:
        """Send the beginning of a successful streamed answer to the client. Raises CannotContinue if this does not follow
        what the client already has."""
        answer, stream = opened.answer, opened.stream
        if isinstance(answer, WholeAnswer):
            return
        if not continued.goes_on:
            await request.begin(answer, header)
            if stream is not None:
                ttft_s = (time.perf_counter_ns() - request.began_ns) / 1e9
                self._counters.ttft.add(ttft_s, span=sampled_context())
                describe_first_token(answer.span, ttft_s)
        if stream is None or stream.error is None:
            await _report(choice.first_token())
        if stream is not None:
            await self._send_events(request, choice, answer, stream, opened.passed, continued)

    async def pass_on(
        self,
        request: ClientRequest,
        choice: Booked,
        header: tuple[bytes, bytes],
        opened: "OpenedAnswer",
        continued: ContinuedAnswer,
    ) -> None:
        """Send the rest of a successful answer to the client. Raises EngineLost if the engine disappears mid-answer,
        EngineFailed at the end of a stream that reports an engine's error, CannotContinue as `begin` does, or EngineHangs,
        after which this may be called again."""
        answer, usage = opened.answer, None
        if isinstance(answer, WholeAnswer):
            await _report(self._finish(request, choice, answer, usage_of_body(answer.body), continued))
            await request.answer_whole(answer, header)
            return
        if opened.stream is not None:
            usage = await self._pass_events(request, choice, answer, opened.stream, continued)
        else:
            async for chunk in answer:
                await request.send_part(chunk)
            await request.send({"type": "http.response.body", "body": b""})
        await _report(self._finish(request, choice, answer, usage, continued))

    async def ask(self, choice: Booked, path: str, body: Mapping[str, Any]) -> Any:
        """Post a body to the chosen engine, and return the JSON of its answer; None if the engine refuses. Raises
        EngineLost."""
        try:
            reply = await self._engines.call("POST", choice.url.rstrip("/") + path, body, more_headers=choice.headers)
        except EngineAway as error:
            raise EngineLost(str(error)) from error
        if reply.status >= 500:
            raise EngineLost(f"{choice.url}{path}: status {reply.status}")
        try:
            return reply.json() if reply.status == 200 else None
        except ValueError:
            return None

    async def _finish(
        self, request: ClientRequest, choice: Booked, answer: Answer, usage: Usage | None, continued: ContinuedAnswer
    ) -> None:
        if continued.awaits_choice:
            await choice.done(answer.status)
            return
        self._counters.request_time.add((time.perf_counter_ns() - request.began_ns) / 1e9, span=sampled_context())
        whole = continued.whole_usage(usage)
        request.count_usage(whole)
        text = request.text
        if text is None:  # the prompt was not read: nothing to compare or learn
            await choice.done()
            return
        usage = usage_of_one_answer(text, usage if continued.goes_on else whole)
        describe_usage(answer.span, usage)
        timings = timings_of(text, answer.clock, usage)
        await choice.done(
            answer.status, usage, timings, usage_of_one_answer(text, whole) if continued.goes_on else None
        )

    async def _pass_events(
        self,
        request: ClientRequest,
        choice: Booked,
        answer: StreamedAnswer,
        stream: EventStream,
        continued: ContinuedAnswer,
    ) -> Usage | None:
        rest, seam = b"", continued.seam
        try:
            async with asyncio.timeout(END_S if stream.is_over else None) as ending:
                async for chunk in answer:
                    passed = self._read(request, answer, stream, chunk)
                    await self._send_events(request, choice, answer, stream, passed, continued)
                    if stream.is_over and ending.when() is None:
                        ending.reschedule(asyncio.get_running_loop().time() + END_S)
            rest = stream.end()
        except TimeoutError:
            pass  # nothing that matters follows
        except EngineLost:
            if not (stream.is_over if seam is None else seam.missing_end is not None or seam.awaits_choice):
                raise
        if seam is not None:
            rest = await continued.end_engine(rest, partial(self.ask, choice))
            if (end := seam.missing_end) is not None:
                await request.send({"type": "http.response.body", "body": rest + end})
                return stream.usage
            if seam.awaits_choice:
                await request.send_part(rest)
                return None
            if seam.error is not None or seam.why is None:
                if rest:
                    await request.send_part(rest)
                raise (
                    EngineLost("the stream ended before the answer was complete")
                    if seam.error is None
                    else EngineFailed(seam.error)
                )
        if stream.error is None and _is_cut(request, stream):
            raise EngineLost("the stream ended before the answer was complete")
        if stream.error is not None:
            await request.end_failed(stream.error, rest)
            raise EngineFailed(stream.error)
        await request.send({"type": "http.response.body", "body": rest})
        return stream.usage

    def _read(self, request: ClientRequest, answer: StreamedAnswer, stream: EventStream, chunk: bytes) -> bytes:
        before = stream.parts
        passed = stream.feed(chunk)
        if stream.in_event and not request.shows_cached:
            raise EventTooLong
        answer.clock.part(stream.parts - before)
        return passed

    async def _send_events(
        self,
        request: ClientRequest,
        choice: Booked,
        answer: StreamedAnswer,
        stream: EventStream,
        passed: bytes,
        continued: ContinuedAnswer,
    ) -> None:
        seam, began_ns = continued.seam, time.perf_counter_ns()
        request.sent_events, request.in_event = stream.events, stream.in_event
        request.count_sent(stream.parts)
        if seam is not None:
            passed = await continued.feed(passed, partial(self.ask, choice))
            request.sent_events = seam.events
        if stream.is_over:  # clients disconnect as soon as they have the final event, or an error
            seen = stream.error is None or is_seen(request.for_engine.path, stream.error)
            request.complete = seen if seam is None else seam.error is None and not seam.awaits_choice
        if passed:
            await request.send_part(passed)
        answer.clock.hold(time.perf_counter_ns() - began_ns)

    def _hides_usage(self, request: ClientRequest, continued: ContinuedAnswer) -> bool:
        text = request.text
        asks = self._ask_usage or continued.seam is not None
        return text is not None and asks and text.streamed and not text.wants_usage


def _kind_of(choice: Booked) -> EngineKind:
    return (choice.decode if isinstance(choice, PairChoice) else choice).endpoint.kind


def _is_cut(request: ClientRequest, stream: EventStream) -> bool:
    """True if a request's answer lacks its end: a finish reason or the final event. A process between the router and the
    engine may have ended the stream cleanly in the engine's place."""
    return request.text is not None and not stream.finished


async def _report(call: Awaitable[None]) -> None:
    """Report to the other routers. The request does not fail if the store does not answer."""
    try:
        await call
    except Unreachable as error:
        _log.warning("request was not reported to the other routers: %s", error)


def _priority_field(request: ClientRequest, text: TextRequest, choice: Choice) -> dict[str, Any]:
    """The field with the request's priority in the engine's queue; empty if the client gives a priority itself."""
    if text.api not in _WITH_PRIORITY or "priority" in text.body:
        return {}
    arrived_us = time.time() * 1e6 - (time.perf_counter_ns() - request.began_ns) / 1e3
    return {"priority": engine_priority(arrived_us, choice.cost)}
