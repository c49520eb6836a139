"""Sends a request to both engines of a pair, in the engines' protocol. The answer comes from the decode engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvatlas.errors import KvatlasError
from kvatlas.runtime.background_task import end_tasks
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_router.answers.engine_errors import EngineError
from kvatlas_router.answers.event_stream import EventStream
from kvatlas_router.disaggregation.bootstrap import bootstrap_fields
from kvatlas_router.disaggregation.kv_transfer_params import prefill_body, read_params
from kvatlas_router.upstream.engine_answer import (
    Answer,
    EngineRefused,
    EngineRequest,
    StreamedAnswer,
    error_refusal,
)
from kvatlas_router.upstream.engine_client import EngineLost, EngineUnreachable
from kvatlas_router.upstream.status_verdict import Verdict, judge
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.transfer_protocol import TransferProtocol, replace_fields
from router_client.results import RANK_HEADER, Choice

Send = Callable[[Choice, EngineRequest], AbstractAsyncContextManager[Answer]]

_log = RateLimitedLog(logging.getLogger("kvatlas_router.proxy"))


class PrefillFailed(KvatlasError):
    """The prefill worker `worker_id` failed. `error`: its refusal, or the failure of the connection. `own_form`: the
    request that it got differed from the client's, so a refusal may not be the client's fault."""

    def __init__(self, worker_id: str, error: EngineRefused | EngineUnreachable, *, own_form: bool) -> None:
        super().__init__(f"prefill: {error}")
        self.worker_id = worker_id
        self.error = error
        self.own_form = own_form


@dataclass(frozen=True, slots=True)
class PairRequest:
    """One request for both engines of a pair. `decoded`: its decoded body. `fields`: what is added for the decode engine.
    `fetch`: what is added for the prefill engine, to name a source of KV."""

    prefill: Choice
    decode: Choice
    request: EngineRequest
    decoded: Mapping[str, Any]
    fields: Mapping[str, Any]
    fetch: Mapping[str, Any]

    def with_fields(self, fields: Mapping[str, Any]) -> EngineRequest:
        """The client's request with these fields replaced."""
        return _with_body(self.request, replace_fields(self.decoded, self.request.body, fields))


@asynccontextmanager
async def send_to_pair(
    pair: PairChoice,
    decoded: Mapping[str, Any],
    request: EngineRequest,
    fields: Mapping[str, Any],
    fetch: Mapping[str, Any],
    send: Send,
) -> AsyncIterator[Answer]:
    """`async with send_to_pair(...) as answer`: the decode engine's answer, of any status.

    `decoded`, `fields`, `fetch`: see `PairRequest`. The prefill worker's booking ends when its part is done. Raises
    PrefillFailed, or whatever `send` raises for the decode engine.
    """
    assert pair.prefill is not None
    one_by_one = TransferProtocol.of(pair.decode.kind) is TransferProtocol.KV_TRANSFER_PARAMS
    way = _one_after_another if one_by_one else _both_at_once
    async with way(PairRequest(pair.prefill, pair.decode, request, decoded, fields, fetch), send) as answer:
        yield answer


@asynccontextmanager
async def _one_after_another(what: PairRequest, send: Send) -> AsyncIterator[Answer]:
    prefill, decode = what.prefill, what.decode
    try:
        async with send(prefill, _with_body(what.request, prefill_body(what.decoded, what.fetch))) as first:
            answer = await _read_good(prefill, first)
    except (EngineRefused, EngineUnreachable, EngineLost) as error:
        raise PrefillFailed(prefill.worker_id, as_failure(error), own_form=True) from error
    await prefill.done()
    params = read_params(answer)
    if params is None:
        line = f"worker {prefill.worker_id}: no kv_transfer_params in its answer; {decode.worker_id} computes the prompt again"
        _log.report(prefill.worker_id, f"{line}. Start both engines with --kv-transfer-config")
    to_decode = what.with_fields({**what.fields, "kv_transfer_params": params} if params else what.fields)
    async with send(decode, to_decode) as second:
        yield second


@asynccontextmanager
async def _both_at_once(what: PairRequest, send: Send) -> AsyncIterator[Answer]:
    prefill = what.prefill
    rank = prefill.headers.get(RANK_HEADER)
    room = bootstrap_fields(prefill.url, prefill.bootstrap_port, None if rank is None else int(rank))
    failure: EngineRefused | EngineUnreachable | EngineLost | None = None
    waiting = asyncio.timeout(None)
    answered = False

    async def compute_prompt() -> None:
        nonlocal failure
        try:
            async with send(prefill, what.with_fields({**room, **what.fetch})) as answer:
                await _read_good(prefill, answer)
            await prefill.done()
        except (EngineRefused, EngineUnreachable, EngineLost) as error:
            failure = error
            if not answered:  # or the decode engine would keep waiting for its partner
                waiting.reschedule(asyncio.get_running_loop().time())

    async with AsyncExitStack() as stack:
        try:
            async with waiting:
                prefilling = asyncio.create_task(compute_prompt())
                stack.push_async_callback(_stop, prefilling)
                to_decode = what.with_fields({**what.fields, **room})
                answer = await stack.enter_async_context(send(what.decode, to_decode))
                answered = True
        except TimeoutError as error:
            if failure is None:
                raise
            raise PrefillFailed(prefill.worker_id, as_failure(failure), own_form=False) from error
        yield answer


async def _stop(task: "asyncio.Task[None]") -> None:
    """Stop the prefill request. If the engine is still answering, the connection is closed, since nothing would read
    the answer."""
    await end_tasks([task])


async def _read_good(worker: Choice, answer: Answer) -> bytes:
    """Read a successful answer to its end; empty for a stream. Raises EngineRefused (also for an error in the answer) or
    EngineLost."""
    if isinstance(answer, StreamedAnswer):
        stream = EventStream(hide_usage=False)
        async for chunk in answer:
            stream.feed(chunk)
        error = stream.error if answer.events else None
    else:
        if judge(answer.status) is not Verdict.ANSWERED:
            raise EngineRefused(f"{worker.url}: status {answer.status}", answer)
        error = EngineError.of_body(answer.body)
    if error is not None:
        raise error_refusal(worker.url, error, answer)
    return b"" if isinstance(answer, StreamedAnswer) else answer.body


def as_failure(error: EngineRefused | EngineUnreachable | EngineLost) -> EngineRefused | EngineUnreachable:
    """The failure to report: an engine that disappears before any content counts as unreachable."""
    return EngineUnreachable(str(error), connected=True) if isinstance(error, EngineLost) else error


def _with_body(request: EngineRequest, body: bytes) -> EngineRequest:
    return EngineRequest(request.method, request.path, request.query, body)
