"""One stream of external processing, from the request's headers to the answer's end. Asks the picker and follows the answer."""

import asyncio
import logging
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace

from opentelemetry.trace import INVALID_SPAN, Span

from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_router.gateway.answer_reader import AnswerReader
from kvatlas_router.gateway.counters import GatewayCounters
from kvatlas_router.gateway.ext_proc.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    NONE,
    ProcessingRequest,
    ProcessingResponse,
)
from kvatlas_router.gateway.ext_proc.messages import refusal
from kvatlas_router.gateway.ext_proc.stream_state import (
    AnswerHead,
    AnswerPart,
    AskDestination,
    OutOfOrder,
    ResponseMode,
    StreamState,
)
from kvatlas_router.gateway.field_metrics import FieldMetrics
from kvatlas_router.gateway.picker import EndpointPicker, PickedRequest, Refusal, RequestHead
from kvatlas_router.proxy.client_request import ErrorKind
from kvatlas_router.proxy.request_trace import describe_answer, request_span, trace_headers
from router_client.learning.token_counts import Usage

SELECTION = b"test-epp-endpoint-selection"
SERVED = "x-conformance-test-served-endpoint"
ECHO = "x-echo-set-header"
"""Headers of the Inference Extension's conformance suite. SELECTION, in the request, restricts the choice; SERVED, in the
answer, reports it; if the gateway does not show answers to the picker, ECHO makes the suite's echoing engine report
it."""

SOON_S = 0.25
"""If a stream ends within this time after an answer's headers, it ended before the answer did."""

_log = logging.getLogger("kvatlas_router.gateway")

Send = Callable[[ProcessingResponse], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ProcessorSettings:
    """`deadline_s`: a decision that takes longer becomes a refusal, because gateways set no limit in full duplex mode.
    `conformance`: obey the test headers. `own_headers`: headers that are removed if a client sends them, in lower case."""

    response_mode: ResponseMode = ResponseMode.WHOLE
    deadline_s: float = 1.0
    most_body_bytes: int = 64 << 20
    conformance: bool = False
    own_headers: Set[str] = frozenset()


class Processor:
    """Runs streams. Safe to share between tasks of one event loop."""

    def __init__(
        self, picker: EndpointPicker, counters: GatewayCounters, metrics: FieldMetrics, settings: ProcessorSettings
    ) -> None:
        self._picker = picker
        self._counters = counters
        self._metrics = metrics
        self._settings = settings
        self._log = RateLimitedLog(_log)

    async def run(self, messages: AsyncIterable[ProcessingRequest], send: Send) -> None:
        """Process one request. Returns at its end, or when the gateway handles the rest alone.

        Raises OutOfOrder if the gateway violates the protocol.
        """
        stream = _Stream(self._picker, self._counters, self._metrics, self._settings, send)
        try:
            async for message in messages:
                if message.observability_mode:
                    self._counters.observed += 1
                    self._log.report("observed", "the gateway's filter only observes; leaving its streams")
                    return
                if not await stream.process(message):
                    return
        except OutOfOrder as error:
            self._counters.out_of_order += 1
            self._log.report("order", f"{error}; ending the stream with an error")
            raise
        finally:
            await stream.close()


class _Stream:
    def __init__(
        self,
        picker: EndpointPicker,
        counters: GatewayCounters,
        metrics: FieldMetrics,
        settings: ProcessorSettings,
        send: Send,
    ) -> None:
        self._picker = picker
        self._counters = counters
        self._metrics = metrics
        self._came_at = time.monotonic()
        self._attributes: Mapping[str, str] = {}
        self._settings = settings
        self._send = send
        self._state = StreamState(picker.wants_body, settings.response_mode, settings.most_body_bytes)
        self._span_stack = ExitStack()
        self._span: Span = INVALID_SPAN
        self._picked: PickedRequest | None = None
        self._ended = False
        """The end was reported to the picked request."""
        self._reader = AnswerReader(None, hides_usage=False)
        self._status = 0
        self._begun_at = 0.0
        self._prefilled = False
        self._passed_parts = False

    async def process(self, message: ProcessingRequest) -> bool:
        """Process a message. Returns False if the stream needs no further messages."""
        match self._state.receive(message):
            case AskDestination() as ask:
                if not await self._decide(ask):
                    return False
            case AnswerHead() as head:
                await self._begin_answer(head)
            case AnswerPart() as part:
                await self._pass_part(part)
            case replies:
                await self._send_all(replies)
        return not self._state.answer_over and not self._leaves

    @property
    def _leaves(self) -> bool:
        """True if the gateway handles the rest alone. This is never so in full duplex: there the gateway keeps nothing
        that it has sent, so a quick answer would be lost."""
        leaves = self._settings.response_mode is ResponseMode.NONE and not self._state.can_change_answer
        return leaves and self._state.request_over

    async def _decide(self, ask: AskDestination) -> bool:
        head = self._restrict(ask.head)
        self._span = self._span_stack.enter_context(request_span(head.path, head.headers, method=head.method))
        began_ns = time.perf_counter_ns()
        may_change = self._settings.response_mode is ResponseMode.WHOLE and self._state.can_change_answer
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                picked = await self._pick(ask, head, may_change=may_change)
        except TimeoutError:
            self._counters.late += 1
            picked = Refusal(ErrorKind.UNAVAILABLE, f"no decision within {self._settings.deadline_s * 1_000:g} ms")
        took_ns = time.perf_counter_ns() - began_ns
        self._counters.pick_time.add(took_ns / 1e9)
        self._metrics.record_pick(took_ns / 1e9)
        if isinstance(picked, Refusal):
            self._ended = True
            self._metrics.record_refusal(picked.kind.status)
            describe_answer(self._span, picked.kind.status, None)
            await self._send(refusal(picked.kind.status, picked.headers, picked.body(head.path)))
            return False
        self._picked = picked
        self._attributes = self._metrics.record_begin(picked.labels)
        destination = picked.destination
        headers = {**trace_headers(), **destination.headers}
        if self._settings.conformance:
            headers[ECHO] = f"{SERVED}:{destination.endpoints[0]}"
        # a client's own headers would lead to a worker other than the booked one
        own = self._settings.own_headers - {name.lower() for name in headers}
        withdrawn = [name for name in own if head.first(name.encode()) is not None]
        await self._send_all(self._state.forward(replace(destination, headers=headers, withdrawn=withdrawn)))
        renaming = picked.renaming if may_change else None
        self._reader = AnswerReader(
            picked.text, hides_usage=picked.hides_usage, renaming=renaming, objects=picked.objects
        )
        return True

    async def _pick(self, ask: AskDestination, head: RequestHead, *, may_change: bool) -> PickedRequest | Refusal:
        if ask.too_long:
            self._counters.invalid += 1
            most = self._settings.most_body_bytes
            return Refusal(
                ErrorKind.TOO_LONG, f"the body has more than {most} bytes, the limit of --max-body-mib", None
            )
        return await self._picker.pick(head, ask.body, may_hide_usage=may_change)

    def _restrict(self, head: RequestHead) -> RequestHead:
        """The conformance suite's header overrides the gateway's subset."""
        selection = head.first(SELECTION) if self._settings.conformance else None
        if selection is None:
            return head
        return replace(head, subset=tuple(part.strip() for part in selection.split(",") if part.strip()))

    async def _begin_answer(self, head: AnswerHead) -> None:
        # do everything before the reply: if Envoy has nothing more to send, it then ends the stream, which cancels this task
        self._status = head.status
        self._begun_at = time.monotonic()
        self._reader.begin(head.status, head.headers)
        describe_answer(self._span, head.status, None)
        added: Mapping[str, str] = {}
        if self._picked is not None:
            added = self._picked.answer_headers
            await self._picked.begin(head.status, head.headers, head.served or head.upstream)
        if self._settings.conformance:
            added = {**added, SERVED: head.served or "fail: the gateway does not say who served"}
        await self._send(self._state.pass_head(added, changes_length=self._reader.changes_length))
        if self._picked is not None and head.over:
            await self._end_answer(self._picked)

    async def _pass_part(self, part: AnswerPart) -> None:
        if self._picked is not None and part.body:
            self._picked.pass_part(part.body)
        body = self._reader.feed(part.body, last=part.over)
        self._passed_parts = True
        if self._reader.has_content and not self._prefilled and self._is_well and self._picked is not None:
            self._prefilled = True
            age_s = time.monotonic() - self._came_at
            self._metrics.record_first_token(self._attributes, age_s, streamed=self._reader.is_stream)
            await self._picked.first_token()
        await self._send_all(self._state.pass_part(part, body))
        if part.over and self._picked is not None:
            await self._end_answer(self._picked)

    async def _end_answer(self, picked: PickedRequest) -> None:
        self._ended = True
        self._reader.end()
        if self._is_well and self._reader.error is not None:
            self._counters.failed += 1
            self._record_end(str(self._reader.error.status))
            await picked.fail(self._reader.error)
        elif self._is_well:
            self._counters.answered += 1
            self._record_end("", self._reader.usage)
            await picked.finish(self._reader.usage, self._reader.timings)
        else:
            self._counters.failed += 1
            self._record_end(str(self._status))
            await picked.fail()
        if self._reader.kept:  # last and shielded: the end of the stream may cancel this task
            await asyncio.shield(picked.keep(self._reader.kept))

    def _record_end(self, error: str, usage: Usage | None = None) -> None:
        self._metrics.record_end(self._attributes, time.monotonic() - self._came_at, error, usage)

    async def close(self) -> None:
        """Report the end to the picked request, unless already reported. Called however the stream ended."""
        try:
            if self._picked is None:
                self._counters.undecided += not self._ended
            elif not self._ended and (self._state.answer_over or self._reader.is_done):
                # Envoy ends the stream with the last piece, which may cancel this task while it still sends that piece; and
                # many clients disconnect at the event that ends a stream
                await self._end_answer(self._picked)
            elif not self._ended:
                self._ended = True
                await self._close_early(self._picked)
        finally:
            self._span_stack.close()

    async def _close_early(self, picked: PickedRequest) -> None:
        """End a request whose answer's end was not seen."""
        sees_headers_only = self._state.answer_begun and self._is_well and not self._passed_parts
        # Envoy ends the stream after the headers, or with the answer if it may still send trailers; it does not say which
        goes_on = self._reader.is_stream and time.monotonic() - self._begun_at < SOON_S
        if self._leaves or (sees_headers_only and self._state.answer_mode == NONE and goes_on):
            self._counters.left += 1
            self._record_end("")
            await picked.leave()
        elif sees_headers_only and (self._state.answer_mode == NONE or self._overrode):
            self._counters.answered += 1
            self._record_end("")
            await picked.finish(None, None)
        else:
            self._counters.gone += 1
            self._record_end("gone")
            await picked.fail()

    @property
    def _overrode(self) -> bool:
        return self._settings.response_mode is ResponseMode.HEADERS and self._state.request_mode != FULL_DUPLEX_STREAMED

    @property
    def _is_well(self) -> bool:
        return 200 <= self._status < 300

    async def _send_all(self, replies: Iterable[ProcessingResponse]) -> None:
        for reply in replies:
            await self._send(reply)
