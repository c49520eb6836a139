"""Books a worker for a request. Failing workers are avoided. If all workers are full, the request waits for its turn; if all
of them would be too late, it is refused.

The proxy and the endpoint picker admit requests here.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from secrets import token_bytes
from typing import Protocol

from kvatlas.errors import KvatlasError, Unreachable
from kvatlas.reservations import QueueLimits, WaitingRequest
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas_router.admission.queue import AdmissionQueue, Wait
from kvatlas_router.disaggregation.pair_booker import Booked, PairBooker
from kvatlas_router.ejection.avoidance import Avoidance, EnginesRest
from kvatlas_router.tokens.text_request import TextRequest
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt

_log = logging.getLogger("kvatlas_router.proxy")


class RequestShed(KvatlasError):
    """Every engine would miss the SLO by far. The request is refused and its booking is released."""

    def __init__(self, retry_after_s: int) -> None:
        line = f"every engine would miss the SLO (the router's latency target) by far; try again in {retry_after_s} s"
        super().__init__(line)
        self.retry_after_s = retry_after_s


class AdmissionCounters(Protocol):
    """`queued`: how many requests had to wait for a worker with room."""

    queued: int


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """`shed`: refuse a request when the choice advises it. `tenant_header` and `priority_header`: names, in lower case,
    of the headers that carry a request's tenant and its priority in the queue; '' for none."""

    shed: bool = False
    tenant_header: str = ""
    priority_header: str = ""


class Admission:
    """Books workers. The caller ends each booking with `end`. Can be shared between tasks of one event loop."""

    def __init__(
        self,
        pairs: PairBooker,
        avoidance: Avoidance,
        queue: AdmissionQueue,
        counters: AdmissionCounters,
        settings: AdmissionSettings | None = None,
    ) -> None:
        self._pairs = pairs
        self._avoidance = avoidance
        self._queue = queue
        self._counters = counters
        self._settings = settings or AdmissionSettings()

    @property
    def waiting(self) -> int:
        """Number of requests that are waiting for a worker with room."""
        return self._queue.waiting()

    @property
    def pool_waiting(self) -> int:
        """Number of waiting requests from all routers, in the pools in which this router has waiting requests."""
        return self._queue.pool_waiting()

    async def close(self) -> None:
        """Stop asking for turns."""
        await self._queue.close()

    async def admit(
        self,
        prompt: Prompt,
        text: TextRequest | None,
        header: Callable[[bytes], str | None],
        *,
        tenant_id: str | None = None,
        priority: int | None = None,
        weight: float = 1.0,
        wait: Wait | None = None,
    ) -> Booked:
        """Book the first worker or pair for a request. `text=None`: the request's prompt is not read. `header`: a function
        that looks up a header by its lower-case name. `tenant_id`, `priority`: proven values, which override those in the
        headers. `weight`: the tenant's share of the queue. `wait`: filled in if the request waits.

        Raises NoWorkers, EnginesRest, Unreachable, QueueFull or RequestShed.
        """
        if self._queue.settings.requests:
            waiting = self._waiting(prompt, header, tenant_id, priority, weight)
            choice = await self._book_in_turn(prompt, text, waiting, Wait() if wait is None else wait)
        else:
            choice = await self.book(prompt, text)
        if self._settings.shed and choice.advice is Advice.SHED:
            await self.end(prompt, choice)
            raise RequestShed(choice.retry_after_s)
        return choice

    async def book(
        self, prompt: Prompt, text: TextRequest | None, tried: frozenset[str] = frozenset(), *, apart: bool = True
    ) -> Booked:
        """Book a worker that has not been tried yet, even if it has no room. `apart`: a pair is allowed. Raises NoWorkers,
        EnginesRest or Unreachable."""

        def book(avoid: frozenset[str]) -> Awaitable[Booked]:
            return self._pairs.book(prompt, text, avoid, apart=apart)

        return await self._avoidance.choose(prompt, tried, book)

    async def book_again(
        self,
        prompt: Prompt,
        text: TextRequest | None,
        tried: frozenset[str],
        header: Callable[[bytes], str | None],
        *,
        apart: bool = True,
        tenant_id: str | None = None,
        priority: int | None = None,
        weight: float = 1.0,
    ) -> Booked:
        """Like `book`, but for another attempt at an admitted request, or for the rest of its answer. The request does not
        wait again, but its tenant is charged for it if other requests are waiting. See `admit`."""
        if self._queue.settings.requests:
            waiting = replace(self._waiting(prompt, header, tenant_id, priority, weight), may_wait=False)
            prompt = replace(prompt, waiting=waiting)
        return await self.book(prompt, text, tried, apart=apart)

    async def end(self, prompt: Prompt, choice: Booked) -> None:
        """End the request as failed, unless the choice has already been finished."""
        try:
            await choice.done(status=0)
        except Unreachable as error:
            _log.warning("worker %s: booking was not released (%s); it expires", choice.worker_id, error)
        self._queue.record_end(prompt.scope.pool_id)

    async def _book_in_turn(
        self, prompt: Prompt, text: TextRequest | None, waiting: WaitingRequest, wait: Wait
    ) -> Booked:
        async def book(as_it_waits: WaitingRequest, blocked: frozenset[str]) -> Booked | None:
            try:
                return await self.book(replace(prompt, waiting=as_it_waits), text, blocked)
            except EnginesRest:
                return None

        choice: Booked = await self._queue.admit(prompt.scope.pool_id, waiting, book, wait, prompt.wait_s)
        self._counters.queued += bool(wait)
        return choice

    def _waiting(
        self,
        prompt: Prompt,
        header: Callable[[bytes], str | None],
        tenant_id: str | None,
        priority: int | None,
        weight: float,
    ) -> WaitingRequest:
        named = self._settings.tenant_header
        tenant = tenant_id or (header(named.encode()) if named else None) or prompt.scope.tenant_id
        priority = self._priority(header) if priority is None else priority
        return WaitingRequest(
            token_bytes(ID_BYTES),
            tenant,
            QueueLimits(self._queue.settings.requests, self._queue.settings.tokens),
            prompt.input_tokens,
            prompt.output_tokens,
            priority,
            weight,
            prompt.session_id or "",
        )

    def _priority(self, header: Callable[[bytes], str | None]) -> int:
        """The priority in the header. As in vLLM, lower values come first, and the default is 0."""
        named = self._settings.priority_header
        try:
            return int((header(named.encode()) if named else None) or 0)
        except ValueError:
            return 0
