"""Attempts at one request, on one worker after another, until the client has an answer.

The request may go to another worker until the first content of a successful answer arrives. Before that, the client gets
nothing but a stream's comments, which keep its connection alive. The booking of each attempt ends with the attempt: as finished
for a successful answer, as failed for anything else.
"""

import asyncio
import logging
import time
from functools import partial

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas_router.admission.admission import Admission, RequestShed
from kvatlas_router.admission.queue import QueueFull
from kvatlas_router.continuation.reasons import CannotContinue, ContinueMode, Why
from kvatlas_router.continuation.thoughts import ThoughtEnds
from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.disaggregation.pair_sender import PrefillFailed, as_failure
from kvatlas_router.ejection.avoidance import EnginesRest
from kvatlas_router.ejection.monitor import EjectionMonitor
from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.proxy.answer_relay import AnswerRelay, EngineFailed, EventTooLong, OpenedAnswer
from kvatlas_router.proxy.attempts import Attempts, StalledAnswer
from kvatlas_router.proxy.client_request import ClientRequest, ErrorKind
from kvatlas_router.proxy.continued_answer import ContinuedAnswer, ReadPrompt
from kvatlas_router.proxy.counters import ProxyCounters
from kvatlas_router.proxy.headers import decision_header
from kvatlas_router.proxy.request_trace import describe_answer, describe_attempt
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.upstream.engine_answer import (
    EngineHangs,
    EngineRefused,
    EngineStalled,
    StreamedAnswer,
    WholeAnswer,
)
from kvatlas_router.upstream.engine_client import EngineLost, EngineUnreachable
from kvatlas_router.upstream.status_verdict import Verdict, judge
from router_client.errors import NoWorkers
from router_client.prefill_decode_result import PairChoice

_log = logging.getLogger("kvatlas_router.proxy")

LOST_STATUS = 502
"""Status recorded for an answer that broke off, which counts as an engine's failure."""
AGAIN_S = 0.25
"""If no engine accepted a connection, all of them are tried again after this time."""
LEAVE_AGAIN_S = 5.0
"""If no other worker continues a stalled engine's answer, other workers are tried again after this time."""


class WorkerAttempts:
    """Books workers for requests and judges their answers. `most_attempts`: maximum number of workers tried for one
    request."""

    def __init__(
        self,
        catalogue: Catalogue,
        relay: AnswerRelay,
        ejections: EjectionMonitor,
        counters: ProxyCounters,
        admission: Admission,
        most_attempts: int = 4,
        continues: ContinueMode = ContinueMode.OFF,
    ) -> None:
        """`continues`: the requests whose streams continue elsewhere if their engine dies."""
        self._continues = continues
        self._catalogue = catalogue
        self._relay = relay
        self._ejections = ejections
        self._counters = counters
        self._admission = admission
        self._most_attempts = most_attempts
        self._thought_ends: dict[str, ThoughtEnds] = {}
        """By pool."""

    async def run(self, request: ClientRequest, read: RequestPrompt, read_prompt: ReadPrompt) -> None:
        """Try workers until one answers, or none is left to try. The client gets an answer in any case. `read_prompt`: reads
        the prompt of a request for the rest of an answer."""
        pool_id = read.prompt.scope.pool_id
        if (ends := self._thought_ends.get(pool_id)) is None:
            ends = self._thought_ends[pool_id] = ThoughtEnds()
        answer = ContinuedAnswer.of(
            request, self._continues, self._counters.continued, read_prompt, self._catalogue.kind_of, ends
        )
        budget = self._ejections.retry_budget(pool_id, request.caller.tenant_id)
        budget.record_request()
        attempts = Attempts(request, read, answer, pool_id, budget)
        if await self._try_workers(attempts):
            return
        if attempts.begun:
            await self._end_broken(attempts, Why.NO_WORKER)
            return
        if attempts.refused is not None:
            refusal, header = attempts.refused
            if judge(refusal.status) is Verdict.ELSEWHERE:
                self._counters.gave_up += 1
            else:
                self._counters.refused_by_engine += 1
            describe_answer(request.span, refusal.status, None)
            await request.answer_whole(refusal, header)
            return
        self._counters.gave_up += 1
        await request.refuse(ErrorKind.UNAVAILABLE, attempts.line)

    async def _try_workers(self, attempts: Attempts) -> bool:
        """Try workers until the client has its answer. False if none is left to try."""
        budget = attempts.budget
        while attempts.number < self._most_attempts:
            if attempts.number and not attempts.free and not attempts.paid and not budget.take():
                self._counters.retries_denied += 1
                break
            self._counters.retried += attempts.number > 0
            attempts.number += 1
            attempts.paid = False
            try:
                if await self._try(attempts):
                    return True
            except (RequestShed, QueueFull, EnginesRest) as error:
                if attempts.refused is not None or attempts.begun:
                    break
                await self._hold_off(attempts.request, error)
                return True
            except InvalidValue as error:  # a wrong token id, found only on hashing
                await attempts.request.refuse(ErrorKind.INVALID, str(error))
                return True
            except (NoWorkers, Unreachable) as error:
                attempts.line = attempts.line or str(error)
                if not attempts.free or attempts.begun or attempts.number == self._most_attempts:
                    break
                await asyncio.sleep(AGAIN_S)
                attempts.tried = frozenset()
        return False

    async def _try(self, attempts: Attempts) -> bool:
        """Make one attempt. Returns True if the client has its answer. Raises whatever booking raises."""
        request, pool_id, read, continued = attempts.request, attempts.pool_id, attempts.read, attempts.answer
        choice = await self._book(read, attempts)
        try:
            worker_id = choice.worker_id
            attempts.free = False
            header = decision_header(choice, read, attempt=attempts.number)
            request.decision = header[1].decode()
            unjudged = _workers_of(choice)
            for one in unjudged:
                self._ejections.record_sent(pool_id, one)
            opened: OpenedAnswer | None = None
            try:
                async with self._relay.send(request, choice, partial(self._may_move, attempts), continued) as answer:
                    describe_attempt(request.span, worker_id=worker_id, attempt=attempts.number, status=answer.status)
                    if isinstance(answer, WholeAnswer) and judge(answer.status) is not Verdict.ANSWERED:
                        raise EngineRefused(f"{choice.url}: status {answer.status}", answer)
                    opened = await self._relay.open(request, choice, header, answer, continued)
                    continued.fit(readable=opened.stream is not None)
                    await continued.check(partial(self._relay.ask, choice))
                    for one in unjudged:
                        self._ejections.record_good(pool_id, one)
                    await self._blame_doubted(attempts, worker_id)
                    await self._leave_stalled(attempts)
                    continued.join()
                    self._counters.answered += not attempts.begun
                    attempts.begun = True
                    describe_answer(request.span, answer.status, worker_id)
                    await self._relay.begin(request, choice, header, opened, continued)
                    if not await self._pass_on(attempts, choice, header, opened):
                        unjudged.discard(worker_id)
                    while unjudged:
                        self._ejections.record_complete(pool_id, unjudged.pop())
            except EngineFailed as error:
                await _end_booking(choice, error.status)
                if self._record_failed(pool_id, worker_id, error):
                    unjudged.discard(worker_id)
                    return await self._go_on(attempts, worker_id, error)
                await continued.end(None)
            except EventTooLong as error:
                await _end_booking(choice, 0)
                self._counters.refused_by_engine += 1
                await request.refuse(ErrorKind.INVALID, str(error), retry_after_s=None)
            except CannotContinue as error:
                await self._end_broken(attempts, error.why)
            except (EngineRefused, EngineUnreachable, EngineLost, PrefillFailed) as error:
                await _end_booking(choice, LOST_STATUS if isinstance(error, EngineLost) else 0)
                if isinstance(error, EngineLost) and opened is not None:
                    unjudged.discard(worker_id)
                    self._ejections.record_bad(pool_id, worker_id, str(error))
                    _log.warning("worker %s: %s", worker_id, error)
                    return await self._go_on(attempts, worker_id, error)
                by = error.worker_id if isinstance(error, PrefillFailed) else worker_id
                unjudged.discard(by)
                return await self._judge_failure(attempts, by, error, header)
            finally:
                for one in unjudged:
                    self._ejections.record_unknown(pool_id, one)
        finally:
            await self._admission.end(read.prompt, choice)
        if continued.awaits_choice:
            attempts.number, attempts.free = attempts.number - 1, True  # no engine failed
            return await self._go_on(attempts)
        return True

    async def _go_on(
        self, attempts: Attempts, worker_id: str | None = None, error: EngineLost | EngineFailed | None = None
    ) -> bool:
        """Handle an answer whose engine (this worker) died midway, or one choice of which ended after such a death. Returns
        False if another worker should continue it; True if it has ended."""
        attempts.tried |= {worker_id} if worker_id is not None else frozenset()
        attempts.apart = False
        try:
            attempts.read = await attempts.answer.prepare(attempts.read, error)
        except CannotContinue as cannot:
            await self._end_broken(attempts, cannot.why)
            return True
        return False

    async def _pass_on(
        self, attempts: Attempts, choice: Booked, header: tuple[bytes, bytes], opened: OpenedAnswer
    ) -> bool:
        """Pass an answer on. If its engine stalls, returns False if another worker continues it; otherwise the client waits
        for the rest."""
        while True:
            try:
                await self._relay.pass_on(attempts.request, choice, header, opened, attempts.answer)
            except EngineHangs as error:
                assert isinstance(opened.answer, StreamedAnswer)
                if await self._try_others(attempts, StalledAnswer(choice, opened.answer, error)):
                    return False
                opened.answer.watched.stay()
                attempts.leave_at = time.monotonic() + LEAVE_AGAIN_S
            else:
                return True

    async def _try_others(self, attempts: Attempts, stalled: StalledAnswer) -> bool:
        """Continue an answer on another worker. Returns False if none can, and the client has received nothing more of
        the answer."""
        read, number, decision = attempts.read, attempts.number, attempts.request.decision
        tried = attempts.tried = attempts.tried | {stalled.choice.worker_id}
        attempts.apart, attempts.stalled = False, stalled
        try:
            attempts.read = await attempts.answer.prepare(read, stalled.error)
            if await self._try_workers(attempts):
                return True
            if attempts.stalled is None:  # another worker continued the answer, and died
                await self._end_broken(attempts, Why.NO_WORKER)
                return True
            why = attempts.line or "no other worker is left to try"
        except CannotContinue as error:
            why = str(error)
        _log.info("worker %s: it is stalled, but keeps its request: %s", stalled.choice.worker_id, why)
        attempts.answer.stay()
        attempts.stalled, attempts.read, attempts.request.decision = None, read, decision
        if attempts.tried == tried:
            attempts.number = number
        return False

    async def _leave_stalled(self, attempts: Attempts) -> None:
        """Abandon the engine whose answer stalled, now that another one is answering."""
        stalled, attempts.stalled = attempts.stalled, None
        if stalled is None:
            return
        worker_id = stalled.choice.worker_id
        stalled.answer.leave()
        await _end_booking(stalled.choice, LOST_STATUS)
        self._ejections.record_bad(attempts.pool_id, worker_id, str(stalled.error))
        _log.warning("worker %s: %s", worker_id, stalled.error)

    async def _end_broken(self, attempts: Attempts, why: Why | None) -> None:
        """End a begun answer with its engine's error, since no worker can continue it. Raises CannotContinue instead as long
        as its stalled engine may still continue it."""
        if attempts.stalled is not None:
            raise CannotContinue(why)
        self._counters.broken += 1
        await attempts.answer.end(why)

    async def _judge_failure(
        self,
        attempts: Attempts,
        worker_id: str,
        error: EngineRefused | EngineUnreachable | EngineLost | PrefillFailed,
        header: tuple[bytes, bytes],
    ) -> bool:
        """Handle an attempt without an answer. Returns False if another worker should be tried; True if the client got
        the refusal."""
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
        describe_attempt(
            attempts.request.span, worker_id=worker_id, attempt=attempts.number, status=None, note=str(cause)
        )
        if isinstance(cause, EngineStalled):
            self._ejections.record_unknown(attempts.pool_id, worker_id)
            _log.info("worker %s: %s; trying another", worker_id, cause)
            return False
        self._counters.unreachable += 1
        attempts.free = not cause.connected
        self._ejections.record_bad(attempts.pool_id, worker_id, str(cause), unreachable=True)
        _log.warning("worker %s: %s; trying another", worker_id, cause)
        if attempts.begun and cause.connected:  # perhaps whatever comes next in the answer killed two engines
            await self._end_broken(attempts, Why.SAME_TOKEN)
            return True
        return False

    def _record_failed(self, pool_id: str, worker_id: str, error: EngineFailed) -> bool:
        """Record an answer that ended with the engine's error. Returns True if that is the worker's fault."""
        if judge(error.status) is not Verdict.ELSEWHERE:
            self._counters.refused_by_engine += 1
            return False
        self._ejections.record_bad(pool_id, worker_id, str(error))
        _log.warning("worker %s: %s", worker_id, error)
        return True

    def _may_move(self, attempts: Attempts, others: frozenset[str], began: bool) -> bool:
        """True if a request that is waiting at a stalled engine may move to one of these workers. It keeps waiting if the
        budget is used up."""
        if began and (attempts.stalled is not None or time.monotonic() < attempts.leave_at):
            return False
        if began and not attempts.answer.may_go_on:
            return False
        if attempts.number >= self._most_attempts or not others - attempts.tried:
            return False
        attempts.paid = attempts.paid or attempts.budget.take()
        return attempts.paid

    async def _judge_refusal(
        self,
        attempts: Attempts,
        worker_id: str,
        refusal: EngineRefused,
        header: tuple[bytes, bytes],
        *,
        own_form: bool,
    ) -> bool:
        """Handle an engine's refusal. Returns False if another worker should be tried; True if the client got the refusal.
        `own_form`: the refused request was not in the client's own form."""
        request, answer = attempts.request, refusal.answer
        verdict = self._ejections.record_status(
            attempts.pool_id, worker_id, answer.status, answer.headers, str(refusal)
        )
        if verdict is Verdict.ELSEWHERE:
            self._counters.refused += 1
            return False
        if own_form:
            return False
        if answer.status == 404 and request.objects is not None and request.objects.ids:
            verdict = Verdict.REFUSED  # only this engine can have the object
        if verdict is Verdict.DOUBTFUL and attempts.doubted is None:
            attempts.doubted = worker_id, answer.status
            return False
        if attempts.begun:
            await self._end_broken(attempts, Why.REFUSED)
            return True
        self._counters.refused_by_engine += 1
        describe_answer(request.span, answer.status, worker_id)
        await request.answer_whole(answer, header)
        return True

    async def _blame_doubted(self, attempts: Attempts, worker_id: str) -> None:
        """Record the doubted worker's refusal as its own failure, since this worker answered the same request."""
        if attempts.doubted is None:
            return
        doubted, status = attempts.doubted
        line = f"status {status} to a request that {worker_id} answers"
        self._ejections.record_bad(attempts.pool_id, doubted, line)
        if status == 404 and attempts.request.model is not None:
            await self._catalogue.forget_name(doubted, attempts.request.model)

    async def _hold_off(self, request: ClientRequest, error: RequestShed | QueueFull | EnginesRest) -> None:
        kind = ErrorKind.BUSY
        if isinstance(error, RequestShed):
            self._counters.shed += 1
            kind = ErrorKind.UNAVAILABLE
        elif isinstance(error, QueueFull):
            self._counters.queue_full += 1
        else:
            self._counters.gave_up += 1
        await request.refuse(kind, str(error), retry_after_s=error.retry_after_s)

    async def _book(self, read: RequestPrompt, attempts: Attempts) -> Booked:
        """Book a worker that has not been tried yet."""
        request, prompt = attempts.request, read.prompt
        if attempts.number == 1:
            return await self._admission.admit(
                prompt,
                request.text,
                request.trusted_header,
                tenant_id=request.caller.tenant_id,
                priority=request.priority,
                weight=request.caller.weight,
                wait=request.wait,
            )
        return await self._admission.book_again(
            prompt,
            request.text,
            attempts.tried,
            request.trusted_header,
            apart=attempts.apart,
            tenant_id=request.caller.tenant_id,
            priority=request.priority,
            weight=request.caller.weight,
        )


async def _end_booking(choice: Booked, status: int) -> None:
    """End a failed attempt's booking. If the store does not answer, the request continues anyway."""
    try:
        await choice.done(status=status)
    except Unreachable as error:
        _log.warning("worker %s: booking was not released (%s); it expires", choice.worker_id, error)


def _workers_of(choice: Booked) -> set[str]:
    prefill = choice.prefill if isinstance(choice, PairChoice) else None
    return {choice.worker_id} if prefill is None else {choice.worker_id, prefill.worker_id}
