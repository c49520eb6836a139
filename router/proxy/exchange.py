"""Takes one request through the proxy, from its arrival to its record: reads the prompt, then hands the request over to
`WorkerAttempts`."""

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.identity import Scope
from kvatlas.telemetry import sampled_context, step_span
from kvatlas.telemetry.duration_series import OTHER, Durations
from kvatlas_router.admission.admission import Admission
from kvatlas_router.disaggregation.kv_sources import let_fetch
from kvatlas_router.engine_objects.object_holders import ObjectHolders, ObjectUnknown, only_for
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader, UnknownModel
from kvatlas_router.proxy.client_request import ClientRequest, ErrorKind
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.engine_call import INFERENCE
from kvatlas_router.proxy.request_trace import request_span
from kvatlas_router.proxy.worker_attempts import WorkerAttempts
from kvatlas_router.tenancy.limits import OverLimit
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import TextRequest
from router_client.decision.request_hints import RequestHintHeaders

_log = logging.getLogger("kvatlas_router.proxy")

_METHODS = {"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"}
AGAIN_S = 5.0
"""A cancelled request that is still running after this time is cancelled again: whatever it waits for may have
swallowed the cancellation (see `kvatlas.runtime.background_task`), or its clean-up may be taking too long."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """`request_hints`: obey the headers of `RequestHintHeaders`."""

    access_log: bool = True
    request_hints: bool = False


class Exchange:
    """Runs requests. Can be shared between tasks of one event loop."""

    def __init__(
        self,
        reader: RequestReader,
        catalogue: Catalogue,
        objects: ObjectHolders,
        admission: Admission,
        worker_attempts: WorkerAttempts,
        counters: ProxyCounters,
        settings: ExchangeSettings | None = None,
    ) -> None:
        self._reader = reader
        self._catalogue = catalogue
        self._objects = objects
        self._admission = admission
        self._worker_attempts = worker_attempts
        self._counters = counters
        self._settings = settings or ExchangeSettings()
        self._running: dict[asyncio.Task[Any], ClientRequest] = {}
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
        """Number of prompt tokens in the running requests that have been read so far."""
        return sum(request.prompt_tokens for request in list(self._running.values()))

    @property
    def waiting(self) -> int:
        """Number of running requests that are waiting for a worker with room."""
        return self._admission.waiting

    @property
    def pool_waiting(self) -> int:
        """Number of waiting requests from all routers, in the pools in which this router has waiting requests."""
        return self._admission.pool_waiting

    async def run(self, request: ClientRequest) -> None:
        """Answer one request. If the client disconnects, all its work is cancelled, including the engine's."""
        self._counters.requests += 1
        answering, sent, is_cut = asyncio.current_task(), request.for_engine, False
        assert answering is not None
        self._running[answering] = request
        request.on_leave(partial(self._let_go, request, answering))
        with request_span(sent.path, request.headers, method=sent.method, model=request.model) as request.span:
            try:
                await self._answer(request)
            except asyncio.CancelledError:
                if not (self._cutting or request.gone):
                    raise
                is_cut = not (request.gone or request.complete)
            finally:
                del self._running[answering]
                self._record_end(request)
                if self._settings.access_log:
                    request.log()
        if is_cut:
            self._counters.cut += 1
            await request.break_off(ErrorKind.UNAVAILABLE, "the router is stopping; send the request again")

    def _let_go(self, request: ClientRequest, answering: "asyncio.Task[Any]") -> None:
        """Cancel the work for a client that has disconnected, unless only the report to the other routers is left."""
        if not request.complete:
            request.gone = True
            self._counters.gone += 1
            self._cancel(answering)

    def _cancel(self, answering: "asyncio.Task[Any]") -> None:
        """Cancel a request repeatedly until it has ended."""
        if answering in self._running:
            answering.cancel()
            answering.get_loop().call_later(AGAIN_S, self._cancel, answering)

    def _record_end(self, request: ClientRequest) -> None:
        sent = request.for_engine
        method = sent.method if sent.method in _METHODS else OTHER
        path = sent.path if sent.path in INFERENCE else ""
        status = "" if request.status is None else str(request.status)
        seconds = (time.perf_counter_ns() - request.began_ns) / 1e9
        self._durations.add((method, path, status), seconds, sampled_context())

    async def wait_until_idle(self) -> None:
        """Wait until no request is running."""
        while self._running:
            await asyncio.wait(self._running)

    def cut(self) -> int:
        """End all running requests, each with an error for its client. Returns their number."""
        self._cutting = True
        for answering in self._running:
            self._cancel(answering)
        return len(self._running)

    async def _answer(self, request: ClientRequest) -> None:
        try:
            hints = RequestHintHeaders.read(request.headers) if self._heeds_hints(request) else None
            read = await self._read(request)
        except UnknownModel as error:
            await request.refuse(ErrorKind.NO_MODEL, str(error), param="model")
            return
        except ObjectUnknown as error:
            await request.refuse(ErrorKind.NO_OBJECT, str(error))
            return
        except InvalidValue as error:
            await request.refuse(ErrorKind.INVALID, str(error))
            return
        except Unreachable as error:
            await request.refuse(ErrorKind.UNAVAILABLE, str(error))
            return
        others = 0 if request.text is None else request.text.other_prompts_tokens
        request.prompt_tokens = read.prompt.input_tokens + others
        try:
            await request.take_tokens(read.prompt)
        except OverLimit as error:
            await request.refuse(ErrorKind.BUSY, str(error), retry_after_s=error.retry_after_s)
            return
        if hints is not None:
            request.priority = hints.priority if request.priority is None else request.priority

        def complete(read: RequestPrompt, text: TextRequest | None) -> RequestPrompt:
            read = let_fetch(self._reader.with_session(read, request.headers), text)
            return read if hints is None else replace(read, prompt=hints.apply(read.prompt))

        async def read_prompt(text: TextRequest) -> RequestPrompt:
            return complete(await self._reader.read(text, request.id, request.caller), text)

        await self._worker_attempts.run(request, complete(read, request.text), read_prompt)

    def _heeds_hints(self, request: ClientRequest) -> bool:
        return self._settings.request_hints and request.is_trusted

    async def _read(self, request: ClientRequest) -> RequestPrompt:
        """Raises UnknownModel, InvalidValue, Unreachable or ObjectUnknown."""
        holder = None
        if request.objects is not None:
            tenant_id = request.caller.tenant_id
            workers = await self._catalogue.workers_for(request.model, seen_by=tenant_id)
            holder = await self._objects.find(request.objects, workers, tenant_id)
        if holder is None:
            return await self._read_prompt(request)
        if request.model is None:
            scope = Scope(holder.endpoint.model_id, holder.endpoint.tokenizer_id)
            if request.caller.tenant_id is not None:
                scope = replace(scope, tenant_id=request.caller.tenant_id)
            read = self._reader.guess(scope, request.letters, request.id, request.caller)
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
