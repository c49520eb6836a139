"""One request through the proxy: a worker is chosen and booked, and another one if that is full or away.

Nothing is sent to the client before the first byte of an answer is there; until then the request may go to another worker.
The booking of each try ends with the try.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from opentelemetry.trace import Span

from kvatlas.errors import InvalidValue, KvatlasError, Unreachable
from router_client.client import RouterClient
from router_client.errors import NoWorkers
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt
from router_client.proxy.answer_relay import AnswerRelay
from router_client.proxy.client_request import ClientRequest, send_answer, send_error
from router_client.proxy.counters import ProxyCounters
from router_client.proxy.request_reader import RequestReader, UnknownModel
from router_client.proxy.tracing import describe_answer, describe_try, request_span
from router_client.proxy.upstream import EngineLost, EngineRefused, EngineUnreachable, WholeAnswer
from router_client.results import Choice
from router_client.tokens.prompt_reader import RequestPrompt

SHUN_S = 2.0
"""How long a worker that did not answer is avoided: by then its fleet record says that it is down."""

_log = logging.getLogger("router_client.proxy")


class RequestShed(KvatlasError):
    """Every engine would miss the SLO by far: the request is refused, and its booking released."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("every engine would miss the SLO by far; try again later")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """`most_attempts`: workers tried for one request. `shed`: refuse a request if that is the advice."""

    most_attempts: int = 4
    shed: bool = False


class Exchange:
    """Runs requests; safe to share between tasks of one event loop."""

    def __init__(
        self,
        client: RouterClient,
        reader: RequestReader,
        relay: AnswerRelay,
        counters: ProxyCounters,
        settings: ExchangeSettings | None = None,
    ) -> None:
        self._client = client
        self._reader = reader
        self._relay = relay
        self._counters = counters
        self._settings = settings or ExchangeSettings()
        self._shunned: dict[str, float] = {}

    async def run(self, request: ClientRequest) -> None:
        """Answer one request. If the client goes away, everything that runs for it is cancelled, at the engine too."""
        self._counters.requests += 1
        answering = asyncio.ensure_future(self._answer(request))
        leaving = asyncio.ensure_future(request.wait_until_gone())
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

    async def _answer(self, request: ClientRequest) -> None:
        with request_span(request.for_engine.path, request.headers) as span:
            try:
                read = await self._reader.read(request.text, request.id)
            except UnknownModel as error:
                await _refuse(request, span, 404, "NotFoundError", str(error))
                return
            except InvalidValue as error:
                await _refuse(request, span, 400, "BadRequestError", str(error))
                return
            except Unreachable as error:
                await _refuse(request, span, 503, "ServiceUnavailableError", str(error))
                return
            if read.prompt_tokens is None:
                self._counters.untokenized += 1
            if (session_id := request.session_id) is not None:
                read = replace(read, prompt=replace(read.prompt, session_id=session_id))
            await self._try_workers(request, read, span)

    async def _try_workers(self, request: ClientRequest, read: RequestPrompt, span: Span) -> None:
        tried: set[str] = set()
        refusal: WholeAnswer | None = None
        line = ""
        begun = False
        for attempt in range(1, self._settings.most_attempts + 1):
            worker_id = ""
            try:
                async with self._book(read.prompt, tried) as choice:
                    worker_id = choice.worker_id
                    if self._settings.shed and attempt == 1 and choice.advice is Advice.SHED:
                        raise RequestShed(choice.retry_after_s)
                    async with self._relay.send(request, choice) as answer:
                        describe_try(span, worker_id=worker_id, attempt=attempt, status=answer.status)
                        describe_answer(span, answer.status, worker_id)
                        begun = True
                        await self._relay.pass_on(request, read.prompt_tokens, choice, attempt, answer)
                return
            except EngineRefused as error:
                self._counters.refused += 1
                refusal, line = error.answer, str(error)
                describe_try(span, worker_id=worker_id, attempt=attempt, status=error.answer.status)
            except EngineUnreachable as error:
                self._counters.unreachable += 1
                line = str(error)
                self._shunned[worker_id] = time.monotonic() + SHUN_S
                _log.warning("worker %s: %s; avoiding it for %g s, trying another", worker_id, line, SHUN_S)
                describe_try(span, worker_id=worker_id, attempt=attempt, status=None, note=line)
            except RequestShed as error:
                self._counters.shed += 1
                describe_answer(span, 503, None)
                await send_error(request.send, 503, "ServiceUnavailableError", str(error), error.retry_after_s)
                return
            except EngineLost:
                return  # the client has its error event; the booking ended as failed
            except (NoWorkers, Unreachable) as error:
                if begun:  # only the booking could not be released; it expires
                    _log.warning("worker %s: booking not released (%s); it expires", worker_id, error)
                    return
                line = line or str(error)
                break
            tried.add(worker_id)
        self._counters.gave_up += 1
        if refusal is not None:
            describe_answer(span, refusal.status, None)
            await send_answer(request.send, refusal)
            return
        await _refuse(request, span, 503, "ServiceUnavailableError", line)

    @asynccontextmanager
    async def _book(self, prompt: Prompt, tried: set[str]) -> AsyncIterator[Choice]:
        """A worker that was not tried yet; those that lately did not answer only if no other is left."""
        now = time.monotonic()
        self._shunned = {worker_id: until for worker_id, until in self._shunned.items() if until > now}
        shunned = self._shunned.keys() - tried
        async with AsyncExitStack() as stack:
            try:
                choice = await stack.enter_async_context(self._client.route(prompt, avoid=tried | shunned))
            except NoWorkers:
                if not shunned:
                    raise
                choice = await stack.enter_async_context(self._client.route(prompt, avoid=tried))
            yield choice


async def _refuse(request: ClientRequest, span: Span, status: int, kind: str, line: str) -> None:
    describe_answer(span, status, None)
    await send_error(request.send, status, kind, line)
