"""One request through the proxy: chooses and books a worker, and another one if that fails.

The request may go to another worker until the first content of a successful answer arrives. Before that, the client gets
nothing but a stream's comments, which keep its connection alive. The booking of each try ends with the try: as finished for a
successful answer, as failed for anything else.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from opentelemetry.trace import Span, use_span

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.identity import Scope
from kvatlas.telemetry import sampled_context, step_span
from kvatlas.telemetry.duration_series import OTHER, Durations
from kvatlas_router.admission.admission import Admission, RequestShed
from kvatlas_router.admission.queue import QueueFull
from kvatlas_router.disaggregation.kv_sources import let_fetch
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.disaggregation.pair_sender import PrefillFailed, as_failure
from kvatlas_router.engine_objects.object_holders import ObjectHolders, ObjectUnknown, only_for
from kvatlas_router.outliers.avoidance import EnginesRest
from kvatlas_router.outliers.monitor import OutlierMonitor
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader, UnknownModel
from kvatlas_router.proxy.answer_relay import AnswerRelay, EngineFailed, OpenedAnswer
from kvatlas_router.proxy.client_request import ClientRequest, ErrorKind
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.engine_call import INFERENCE
from kvatlas_router.proxy.headers import decision_header
from kvatlas_router.proxy.request_trace import describe_answer, describe_try, request_span
from kvatlas_router.tenancy.limits import OverLimit
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.upstream.engine_answer import EngineRefused, EngineStalled, WholeAnswer
from kvatlas_router.upstream.engine_client import EngineLost, EngineUnreachable
from kvatlas_router.upstream.status import Verdict, judge
from router_client.decision.request_hints import RequestHintHeaders
from router_client.errors import NoWorkers
from router_client.prefill_decode_result import PairChoice

_log = logging.getLogger("kvatlas_router.proxy")

_METHODS = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"}
LOST_STATUS = 502
"""Status recorded for an answer that broke off, which is an engine's failure."""
AGAIN_S = 0.25
"""If no connection to any engine succeeded, they are tried again after this time."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """`most_attempts`: workers tried for one request. `request_hints`: heed the headers of `RequestHintHeaders`."""

    most_attempts: int = 4
    access_log: bool = True
    request_hints: bool = False


@dataclass(slots=True)
class _Attempts:
    """One request in a pool, and the outcome of its tries so far.

    `span`: the request's. `refused`: the last unsuccessful answer, with its header. `doubted`: a worker whose refusal may be
    the request's own fault, and its status. `free`: the last try reached no engine, so the next needs no budget. `paid`: the
    budget has already allowed the next try. `apart`: two workers may compute prompt and answer.
    """

    request: ClientRequest
    pool_id: str
    span: Span
    number: int = 0
    tried: frozenset[str] = frozenset()
    line: str = ""
    refused: tuple[WholeAnswer, tuple[bytes, bytes]] | None = None
    doubted: tuple[str, int] | None = None
    free: bool = False
    paid: bool = False
    apart: bool = True


class Exchange:
    """Runs requests. Safe to share between tasks of one event loop."""

    def __init__(
        self,
        reader: RequestReader,
        catalogue: Catalogue,
        relay: AnswerRelay,
        outliers: OutlierMonitor,
        counters: ProxyCounters,
        admission: Admission,
        objects: ObjectHolders,
        settings: ExchangeSettings | None = None,
    ) -> None:
        self._reader = reader
        self._catalogue = catalogue
        self._relay = relay
        self._outliers = outliers
        self._counters = counters
        self._admission = admission
        self._objects = objects
        self._settings = settings or ExchangeSettings()
        self._running: dict[asyncio.Task[None], ClientRequest] = {}
        self._cutting = False
        self._durations = Durations(
            "http_request", ("http.request.method", "http.route", "http.response.status_code"), {"url.scheme": "http"}
        )

    @property
    def in_flight(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def in_flight_tokens(self) -> int:
        """Prompt tokens of the running requests, as far as read."""
        return sum(request.prompt_tokens for request in list(self._running.values()))

    @property
    def waiting(self) -> int:
        """Number of running requests that wait for a worker with room."""
        return self._admission.waiting

    async def run(self, request: ClientRequest) -> None:
        """Answer one request. If the client disconnects, all its work is cancelled, on the engine too."""
        self._counters.requests += 1
        answering = asyncio.ensure_future(self._answer(request))
        leaving = asyncio.ensure_future(request.wait_until_gone())
        self._running[answering] = request
        gone = False
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and request.complete:
                await asyncio.wait((answering,))  # only the report to the other routers is left
            elif not answering.done():
                gone = True
                self._counters.gone += 1
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait((answering, leaving))
            del self._running[answering]
            with use_span(request.span):
                self._record_end(request)
                if self._settings.access_log:
                    request.log(gone=gone)
        if not answering.cancelled():
            answering.result()
        elif self._cutting and not gone:
            self._counters.cut += 1
            await request.break_off(ErrorKind.UNAVAILABLE, "the router is stopping; send the request again")

    def _record_end(self, request: ClientRequest) -> None:
        sent = request.for_engine
        method = sent.method if sent.method in _METHODS else OTHER
        path = sent.path if sent.path in INFERENCE else ""
        status = "" if request.status is None else str(request.status)
        seconds = (time.perf_counter_ns() - request.began_ns) / 1e9
        self._durations.add((method, path, status), seconds, sampled_context())

    async def wait_until_idle(self) -> None:
        """Wait until no request runs."""
        while self._running:
            await asyncio.wait(self._running)
            await asyncio.sleep(0)

    def cut(self) -> int:
        """End all running requests, each with an error for its client. Returns their number."""
        self._cutting = True
        for answering in self._running:
            answering.cancel()
        return len(self._running)

    async def _answer(self, request: ClientRequest) -> None:
        sent = request.for_engine
        with request_span(sent.path, request.headers, method=sent.method, model=request.model) as span:
            request.span = span
            try:
                hints = RequestHintHeaders.read(request.headers) if self._heeds_hints(request) else None
                read = await self._read(request)
            except UnknownModel as error:
                await _refuse(request, span, ErrorKind.NO_MODEL, str(error), param="model")
                return
            except ObjectUnknown as error:
                await _refuse(request, span, ErrorKind.NO_OBJECT, str(error))
                return
            except InvalidValue as error:
                await _refuse(request, span, ErrorKind.INVALID, str(error))
                return
            except Unreachable as error:
                await _refuse(request, span, ErrorKind.UNAVAILABLE, str(error))
                return
            request.prompt_tokens = read.prompt.input_tokens
            try:
                await request.take_tokens(read.prompt)
            except OverLimit as error:
                describe_answer(span, ErrorKind.BUSY.status, None)
                await request.refuse(ErrorKind.BUSY, str(error), retry_after_s=error.retry_after_s)
                return
            read = let_fetch(self._reader.with_session(read, request.header), request.text)
            if hints is not None:
                request.priority = hints.priority if request.priority is None else request.priority
                read = replace(read, prompt=hints.apply(read.prompt))
            await self._try_workers(request, read, span)

    def _heeds_hints(self, request: ClientRequest) -> bool:
        return self._settings.request_hints and (request.caller.is_front or not request.caller.is_proven)

    async def _read(self, request: ClientRequest) -> RequestPrompt:
        """Raises UnknownModel, InvalidValue, Unreachable, and ObjectUnknown."""
        holder = None
        if request.objects is not None:
            workers = await self._catalogue.workers_for(request.model)
            holder = await self._objects.find(request.objects, workers, request.caller.tenant_id)
        if holder is None:
            return await self._read_prompt(request)
        if request.model is None:
            scope = Scope(holder.endpoint.model_id, holder.endpoint.tokenizer_id)
            if request.caller.tenant_id is not None:
                scope = replace(scope, tenant_id=request.caller.tenant_id)
            read = self._reader.guess(scope, request.letters, request.id)
        else:
            read = await self._read_prompt(request)
        return replace(read, prompt=only_for(read.prompt, holder))

    async def _read_prompt(self, request: ClientRequest) -> RequestPrompt:
        if request.text is None:
            return await self._reader.read_length(request.model, request.letters, request.id, request.caller)
        with step_span("read prompt") as span:
            read = await self._reader.read(request.text, request.id, request.caller)
            if span.is_recording():
                span.set_attribute("kvatlas.prompt_tokens", read.prompt.input_tokens)
                span.set_attribute("kvatlas.untokenized", read.untokenized)
        self._counters.untokenized += read.prompt_tokens is None
        return read

    async def _try_workers(self, request: ClientRequest, read: RequestPrompt, span: Span) -> None:
        attempts = _Attempts(request, read.prompt.scope.pool_id, span)
        budget = self._outliers.retry_budget(attempts.pool_id)
        budget.record_request()
        while attempts.number < self._settings.most_attempts:
            if attempts.number and not attempts.free and not attempts.paid and not budget.take():
                self._counters.retries_denied += 1
                break
            self._counters.retried += attempts.number > 0
            attempts.number += 1
            attempts.paid = False
            try:
                if await self._try(read, attempts):
                    return
            except (RequestShed, QueueFull, EnginesRest) as error:
                if attempts.refused is not None:
                    break
                await self._hold_off(request, span, error)
                return
            except (NoWorkers, Unreachable) as error:
                attempts.line = attempts.line or str(error)
                if not attempts.free or attempts.number == self._settings.most_attempts:
                    break
                await asyncio.sleep(AGAIN_S)
                attempts.tried = frozenset()
        if attempts.refused is not None:
            answer, header = attempts.refused
            if judge(answer.status) is Verdict.ELSEWHERE:
                self._counters.gave_up += 1
            else:
                self._counters.refused_by_engine += 1
            describe_answer(span, answer.status, None)
            await request.answer_whole(answer, header)
            return
        self._counters.gave_up += 1
        await _refuse(request, span, ErrorKind.UNAVAILABLE, attempts.line)

    async def _try(self, read: RequestPrompt, attempts: _Attempts) -> bool:
        """Make one try. True if the client has its answer. Raises what booking raises."""
        request, pool_id, span = attempts.request, attempts.pool_id, attempts.span
        async with self._book(read, attempts) as choice:
            worker_id = choice.worker_id
            attempts.free = False
            header = decision_header(choice, read, attempt=attempts.number)
            request.decision = header[1].decode()
            unjudged = _workers_of(choice)
            for one in unjudged:
                self._outliers.record_sent(pool_id, one)
            opened: OpenedAnswer | None = None
            try:
                async with self._relay.send(request, choice, partial(self._may_move, attempts)) as answer:
                    describe_try(span, worker_id=worker_id, attempt=attempts.number, status=answer.status)
                    if isinstance(answer, WholeAnswer) and judge(answer.status) is not Verdict.ANSWERED:
                        raise EngineRefused(f"{choice.url}: status {answer.status}", answer)
                    opened = await self._relay.open(request, choice, header, answer)
                    for one in unjudged:
                        self._outliers.record_good(pool_id, one)
                    await self._blame_doubted(attempts, worker_id)
                    self._counters.answered += 1
                    describe_answer(span, answer.status, worker_id)
                    await self._relay.pass_on(request, choice, header, opened)
                    while unjudged:
                        self._outliers.record_complete(pool_id, unjudged.pop())
            except EngineFailed as error:
                await choice.done(status=error.status)
                if self._record_failed(pool_id, worker_id, error):
                    unjudged.discard(worker_id)
            except (EngineRefused, EngineUnreachable, EngineLost, PrefillFailed) as error:
                await choice.done(status=LOST_STATUS if isinstance(error, EngineLost) else 0)
                if isinstance(error, EngineLost) and opened is not None:
                    unjudged.discard(worker_id)
                    self._outliers.record_bad(pool_id, worker_id, str(error))
                    await self._relay.break_off(request, choice, error)
                    return True
                by = error.worker_id if isinstance(error, PrefillFailed) else worker_id
                unjudged.discard(by)
                return await self._judge_failure(attempts, by, error, header)
            finally:
                for one in unjudged:
                    self._outliers.record_unknown(pool_id, one)
        return True

    async def _judge_failure(
        self,
        attempts: _Attempts,
        worker_id: str,
        error: EngineRefused | EngineUnreachable | EngineLost | PrefillFailed,
        header: tuple[bytes, bytes],
    ) -> bool:
        """Handle a try without an answer. False to try another worker; True if the client got the refusal."""
        own_form = False
        if isinstance(error, PrefillFailed):
            self._counters.apart_failed += 1
            cause, own_form = error.error, error.own_form
        else:
            cause = as_failure(error)
        attempts.tried |= {worker_id}
        attempts.apart = False
        attempts.line = str(cause)
        if isinstance(cause, EngineRefused):
            attempts.refused = attempts.refused if own_form else (cause.answer, header)
            return await self._judge_refusal(attempts, worker_id, cause, header, own_form=own_form)
        describe_try(attempts.span, worker_id=worker_id, attempt=attempts.number, status=None, note=str(cause))
        if isinstance(cause, EngineStalled):
            self._outliers.record_unknown(attempts.pool_id, worker_id)
            _log.info("worker %s: %s; trying another", worker_id, cause)
            return False
        self._counters.unreachable += 1
        attempts.free = not cause.connected
        self._outliers.record_bad(attempts.pool_id, worker_id, str(cause), unreachable=True)
        _log.warning("worker %s: %s; trying another", worker_id, cause)
        return False

    def _record_failed(self, pool_id: str, worker_id: str, error: EngineFailed) -> bool:
        """Record an answer that ended with the engine's error. True if that is the worker's fault."""
        if judge(error.status) is not Verdict.ELSEWHERE:
            self._counters.refused_by_engine += 1
            return False
        self._counters.broken += 1
        self._outliers.record_bad(pool_id, worker_id, str(error))
        _log.warning("worker %s: %s", worker_id, error)
        return True

    def _may_move(self, attempts: _Attempts, others: frozenset[str]) -> bool:
        """True if a request that waits at a stalled engine may move to one of these. It keeps waiting if the budget is used
        up."""
        if attempts.number >= self._settings.most_attempts or not others - attempts.tried:
            return False
        attempts.paid = attempts.paid or self._outliers.retry_budget(attempts.pool_id).take()
        return attempts.paid

    async def _judge_refusal(
        self,
        attempts: _Attempts,
        worker_id: str,
        refusal: EngineRefused,
        header: tuple[bytes, bytes],
        *,
        own_form: bool,
    ) -> bool:
        """Handle an engine's refusal. False to try another worker; True if the client got the refusal. `own_form`: the refused
        request was not in the client's own form."""
        request, answer = attempts.request, refusal.answer
        verdict = self._outliers.record_status(attempts.pool_id, worker_id, answer.status, answer.headers, str(refusal))
        if verdict is Verdict.ELSEWHERE:
            self._counters.refused += 1
            return False
        if own_form:
            return False
        if answer.status == 404 and request.objects is not None and request.objects.ids:
            verdict = Verdict.REFUSED  # the engine should have the object, so no other one has it
        if verdict is Verdict.DOUBTFUL and attempts.doubted is None:
            attempts.doubted = worker_id, answer.status
            return False
        self._counters.refused_by_engine += 1
        describe_answer(attempts.span, answer.status, worker_id)
        await request.answer_whole(answer, header)
        return True

    async def _blame_doubted(self, attempts: _Attempts, worker_id: str) -> None:
        """Record the doubted worker's refusal as its own failure, since this worker answers the same request."""
        if attempts.doubted is None:
            return
        doubted, status = attempts.doubted
        line = f"status {status} to a request that {worker_id} answers"
        self._outliers.record_bad(attempts.pool_id, doubted, line)
        if status == 404 and attempts.request.model is not None:
            await self._catalogue.forget_name(doubted, attempts.request.model)

    async def _hold_off(self, request: ClientRequest, span: Span, error: RequestShed | QueueFull | EnginesRest) -> None:
        kind = ErrorKind.BUSY
        if isinstance(error, RequestShed):
            self._counters.shed += 1
            kind = ErrorKind.UNAVAILABLE
        elif isinstance(error, QueueFull):
            self._counters.queue_full += 1
        else:
            self._counters.gave_up += 1
        describe_answer(span, kind.status, None)
        await request.refuse(kind, str(error), retry_after_s=error.retry_after_s)

    @asynccontextmanager
    async def _book(self, read: RequestPrompt, attempts: _Attempts) -> AsyncIterator[Booked]:
        """Book a worker that was not tried yet. Leaving the block ends the booking unless it has already ended."""
        request, prompt = attempts.request, read.prompt
        if attempts.number == 1:
            choice = await self._admission.admit(
                prompt,
                request.text,
                request.trusted_header,
                tenant_id=request.caller.tenant_id,
                priority=request.priority,
            )
        else:
            choice = await self._admission.book(prompt, request.text, attempts.tried, apart=attempts.apart)
        try:
            yield choice
        finally:
            await self._admission.end(prompt, choice)


def _workers_of(choice: Booked) -> set[str]:
    prefill = choice.prefill if isinstance(choice, PairChoice) else None
    return {choice.worker_id} if prefill is None else {choice.worker_id, prefill.worker_id}


async def _refuse(request: ClientRequest, span: Span, kind: ErrorKind, line: str, param: str | None = None) -> None:
    describe_answer(span, kind.status, None)
    await request.refuse(kind, line, param=param)
