"""Runs an engine's steps in (sped-up) real time and delivers each request's tokens."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.engine.core import EngineCore, EngineLoad
from kvatlas_simulator.engine.generation_request import GeneratedToken, GenerationRequest

_log = logging.getLogger(__name__)

MIN_SLEEP_S = 0.001
"""Event loops can't sleep for a shorter time. Steps that are due sooner run immediately, and the next sleep makes up
for it."""

MAX_LAG_S = 0.1
"""Maximum lag that a busy engine catches up on. On a machine too slow for the speed-up, simulated time runs slower."""


class EventSink(Protocol):
    """Receives an engine's KV events."""

    async def publish(self, events: tuple[KVEvent, ...]) -> None:
        """Send one batch; `events` is not empty."""
        ...


class NoEvents:
    """The sink of an engine without KV events."""

    async def publish(self, events: tuple[KVEvent, ...]) -> None:
        """Drop the batch."""


class EngineLoop:
    """An engine that runs while `run` does. `speed_up` simulated seconds pass in one real second."""

    def __init__(self, core: EngineCore, sink: EventSink, *, speed_up: float = 1.0) -> None:
        self.core = core
        self._sink = sink
        self._us_per_s = speed_up * 1e6
        self._began_at = time.monotonic()
        self._streams: dict[str, MemoryObjectSendStream[GeneratedToken]] = {}
        self._wake = anyio.Event()
        self.asleep = False
        self.hung = False
        """The device computes nothing and the core does not notice; only the HTTP server is alive."""
        self._left: list[str] = []
        """Requests whose clients disconnected while the engine hung."""
        self._step_ended = anyio.Event()
        self._publishing = anyio.Lock()

    @property
    def load(self) -> EngineLoad:
        return self.core.load

    async def run(self) -> None:
        """Step until cancelled; then the streams of all open requests end."""
        try:
            due_us = 0.0
            while True:
                # a request may be aborted before its wake-up arrives here
                while self.asleep or self.hung or not self.core.has_work:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                    due_us = self._now_us()
                # A late step begins at the time it was due, so that oversleeping doesn't add up.
                due_us = await self._step(max(due_us, self._now_us() - MAX_LAG_S * self._us_per_s))
        finally:
            for stream in self._streams.values():
                stream.close()
            self._streams.clear()

    @contextmanager
    def generate(self, request: GenerationRequest) -> Iterator[MemoryObjectReceiveStream[GeneratedToken]]:
        """The tokens of a request, as steps end. Exiting the context early aborts the request.

        If the engine stops, the stream ends without the last token. Raises QueueFull or RequestTooLarge.
        """
        self.core.submit(request)
        send, receive = anyio.create_memory_object_stream[GeneratedToken](math.inf)
        self._streams[request.request_id] = send
        self._wake.set()
        try:
            yield receive
        finally:
            receive.close()
            if self._streams.pop(request.request_id, None) is not None:
                send.close()
                if self.hung:
                    self._left.append(request.request_id)
                else:
                    self.core.abort(request.request_id)

    async def reset_prefix_cache(self, *, preempt_running: bool, include_cpu: bool) -> bool:
        """Reset the core's prefix cache; the events are published immediately, even by an idle engine."""
        done = self.core.reset_prefix_cache(preempt_running=preempt_running, include_cpu=include_cpu)
        await self._publish(self.core.take_events())
        return done

    async def sleep(self) -> None:
        """Drop the cache and make requests wait until `wake_up`, like vLLM."""
        self.asleep = True
        await self.reset_prefix_cache(preempt_running=True, include_cpu=True)

    def wake_up(self) -> None:
        self.asleep = False
        self._wake.set()

    def hang(self) -> None:
        """Compute nothing until `resume`, like a device whose kernel does not return."""
        self.hung = True

    def resume(self) -> None:
        for request_id in self._left:
            self.core.abort(request_id)
        self._left.clear()
        self.hung = False
        self._wake.set()

    async def wait_for_pass(self) -> None:
        """Return when the pass after the current one is computed, or immediately if there is nothing to compute."""
        for _ in range(2):
            if self.core.has_work or self.hung:
                await self._step_ended.wait()

    def _now_us(self) -> float:
        return (time.monotonic() - self._began_at) * self._us_per_s

    async def _step(self, started_us: float) -> float:
        step = self.core.begin_step(started_us)
        ahead_s = (step.ended_us - self._now_us()) / self._us_per_s
        await anyio.sleep(ahead_s if ahead_s >= MIN_SLEEP_S else 0)
        while self.hung:
            self._wake = anyio.Event()
            await self._wake.wait()
        result = self.core.end_step(step)
        self._step_ended.set()
        self._step_ended = anyio.Event()
        await self._publish(result.events)
        for token in result.tokens:
            stream = self._streams.get(token.request_id)
            if stream is not None:
                stream.send_nowait(token)
        return result.ended_us

    async def _publish(self, events: tuple[KVEvent, ...]) -> None:
        async with self._publishing:  # batches are sent in the order of the cache's changes
            if events:
                await self._sink.publish(events)
