"""One request on a worker of the fleet, from its choice to the end of its booking."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kvatlas.runtime.background_task import end_tasks
from kvatlas_router.admission.admission import Admission
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.ejection.monitor import EjectionMonitor
from kvatlas_router.engine_objects.object_holders import ObjectHolders
from kvatlas_router.gateway.asked_request import AskedRequest
from kvatlas_router.gateway.picker import Destination
from kvatlas_router.progress.monitor import ProgressMonitor
from kvatlas_router.proxy.headers import RawHeaders
from kvatlas_router.proxy.predicted_attempt import sent_attempt
from kvatlas_router.tokens.text_request import TextRequest
from kvatlas_router.upstream.status_verdict import Verdict, judge
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.prefill_decode_result import PairChoice
from router_client.prompt import Prompt
from router_client.results import Choice

LEAST_LEFT_S = 0.5
MOST_LEFT_S = 600.0


@dataclass(frozen=True, slots=True)
class BookedPrompt:
    """A prompt, and the worker or pair chosen for it."""

    prompt: Prompt
    choice: Booked

    @property
    def pool_id(self) -> str:
        return self.prompt.scope.pool_id


Move = Callable[[Prompt, str], Awaitable[BookedPrompt | None]]
"""Books the worker at the endpoint that answered. Returns None if that is not a worker of the fleet, or if it can't be
booked."""


class LeftBookings:
    """Ends the bookings of requests whose answers bypass the picker, at the time when the answers should be complete.

    An engine's load report replaces earlier bookings, so a wrong estimate lasts only until the next report.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def hold(self, choice: Booked, end: Callable[[], Awaitable[None]]) -> None:
        """End a booking after its request's estimated time."""
        task = asyncio.create_task(_end_later(choice, end), name="kvatlas left booking")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all these bookings now."""
        await end_tasks(list(self._tasks))


async def _end_later(choice: Booked, end: Callable[[], Awaitable[None]]) -> None:
    try:
        await asyncio.sleep(min(max(choice.score_us / 1e6, LEAST_LEFT_S), MOST_LEFT_S))
        await choice.done()
    finally:
        await end()


@dataclass(frozen=True, slots=True)
class BookedParts:
    """Parts that are shared by all booked requests of a picker."""

    admission: Admission
    ejections: EjectionMonitor
    progress: ProgressMonitor
    left: LeftBookings
    holders: ObjectHolders
    move: Move


class BookedRequest:
    """See `PickedRequest`. As in the proxy, the outcome is recorded for the worker and shared with all routers."""

    def __init__(
        self,
        booked: BookedPrompt,
        destination: Destination,
        text: TextRequest | None,
        parts: BookedParts,
        *,
        asked: AskedRequest,
        answer_headers: Mapping[str, str],
        hides_usage: bool,
    ) -> None:
        """`text`: the request, if its prompt decided the choice."""
        self.destination = destination
        self.text = text
        self.hides_usage = hides_usage
        self.labels = asked.labels
        self.objects = asked.objects
        self.renaming = asked.renaming
        self._tenant_id = asked.caller.tenant_id
        self.answer_headers = answer_headers
        self._booked = booked
        self._parts = parts
        self._judged = False
        self._moved = False
        path = asked.head.path.partition("?")[0]
        self._watched = parts.progress.send(sent_attempt(_decoding(booked.choice), path, text))
        parts.ejections.record_sent(booked.pool_id, booked.choice.worker_id)

    async def begin(self, status: int, headers: RawHeaders, served: str | None) -> None:
        """See `PickedRequest`. If a fallback answered, it is booked instead of the chosen worker."""
        self._judged = True
        self._watched.status = status
        if served is None or served == self.destination.endpoints[0]:
            self._judge(status, headers)
            return
        self._moved = True
        self._watched.leave()  # the gateway gave up on the worker, as a client might
        ejections, first = self._parts.ejections, self._booked
        line = f"the gateway moved on to {served}"
        ejections.record_bad(first.pool_id, first.choice.worker_id, line, unreachable=True)
        await self._end()
        moved = await self._parts.move(first.prompt, served)
        if moved is not None:
            self._booked = moved
            ejections.record_sent(moved.pool_id, moved.choice.worker_id)
            self._judge(status, headers)

    def pass_part(self, part: bytes) -> None:
        """See `PickedRequest`."""
        self._watched.progress(part)

    async def first_token(self) -> None:
        """See `PickedRequest`."""
        await self._booked.choice.first_token()

    async def finish(self, usage: Usage | None, timings: Timings | None) -> None:
        """See `PickedRequest`."""
        if self._moved:
            # the fallback's overlap was never predicted, and its time includes the first attempt
            usage = timings = None
        self._end_watch()
        self._parts.ejections.record_complete(self._booked.pool_id, self._booked.choice.worker_id)
        try:
            await self._booked.choice.done(usage=usage, timings=timings)
        finally:
            await self._end()

    async def keep(self, ids: Sequence[str]) -> None:
        """See `PickedRequest`."""
        await self._parts.holders.record(ids, self._booked.choice.worker_id, self._tenant_id)

    async def fail(self, error: EngineError | None = None) -> None:
        """See `PickedRequest`."""
        if self._watched.status < 400:
            self._watched.leave()
        self._watched.end()
        self._record_unanswered()
        if error is not None and judge(error.status) is Verdict.ELSEWHERE:
            line = f"it returned an error: {error.line}"
            self._parts.ejections.record_bad(self._booked.pool_id, self._booked.choice.worker_id, line)
        try:
            if error is not None:
                await self._booked.choice.done(status=error.status)
        finally:
            await self._end()

    async def leave(self) -> None:
        """See `PickedRequest`."""
        self._end_watch()
        self._record_unanswered()
        self._parts.left.hold(self._booked.choice, self._end)

    def _end_watch(self) -> None:
        """End the watch. If only the answer's headers pass through the picker, they count as its first byte."""
        if self._judged and not self._moved and not self._watched.began:
            self._watched.progress(b"headers")
        self._watched.end()

    def _record_unanswered(self) -> None:
        if not self._judged:
            self._judged = True
            self._parts.ejections.record_unknown(self._booked.pool_id, self._booked.choice.worker_id)

    def _judge(self, status: int, headers: RawHeaders) -> None:
        booked = self._booked
        self._parts.ejections.record_status(booked.pool_id, booked.choice.worker_id, status, headers)

    async def _end(self) -> None:
        await self._parts.admission.end(self._booked.prompt, self._booked.choice)


def _decoding(choice: Booked) -> Choice:
    """The worker that answers."""
    return choice.decode if isinstance(choice, PairChoice) else choice
