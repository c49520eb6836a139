"""Measures how far away the store is, based on its quickest answers."""

import asyncio
import socket
import time
from collections import deque

from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store
from kvatlas.store.deadline import CALLS_A_DECISION, STORE_FAILURES

EVERY_S = 1.0
RECENT = 5


class StoreDistance:
    """The shortest of the last RECENT round trips, because that one was held up least by a busy machine. One quick answer shows
    that the store is near, whereas it takes RECENT slow ones to show that it is far. Round trips are measured with separate
    calls, because those of a choice include the store's computing. The time that this event loop takes to read what has arrived
    is taken off, because a busy router would otherwise take any store for a distant one. If the loop took longer than the
    answer, the round trip tells us nothing about the store."""

    def __init__(self, store: Store | None = None, every_s: float = EVERY_S) -> None:
        """`store=None`: there is no store, so nothing is far away."""
        self._store = store
        self._every_s = every_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._task = BackgroundTask(self._run, "kvatlas store distance")

    def start(self) -> None:
        if self._store is not None:
            self._task.start()

    async def stop(self) -> None:
        """Stop measuring."""
        await self._task.stop()

    @property
    def round_trip_s(self) -> float:
        """The round trip in seconds; 0 as long as it is unknown."""
        known = [seconds for seconds in self._recent if seconds > 0.0]
        return min(known) if known and len(self._recent) == RECENT else 0.0

    def is_far(self, deadline_ms: float | None) -> bool:
        """True if the calls of a decision, made one after another, would take longer than the decision may wait. Always False
        if there is no deadline."""
        return deadline_ms is not None and CALLS_A_DECISION * self.round_trip_s * 1_000 > deadline_ms

    def record(self, seconds: float) -> None:
        """Record how long a round trip took. 0 or less: it was shorter than the loop's own time."""
        self._recent.append(seconds)

    async def _run(self) -> None:
        assert self._store is not None
        while self._task.running:
            try:
                answer_s, turn_s = await asyncio.gather(_answer_s(self._store), _turn_s())
                self.record(answer_s - 2 * turn_s)  # an answer may just have missed a turn of the loop
            except (*STORE_FAILURES, OSError):
                # a store that is down is not far (choices find that out themselves), and neither is one if no descriptor is
                # left here
                await asyncio.sleep(self._every_s)
            if len(self._recent) == RECENT:
                await asyncio.sleep(self._every_s)


async def _answer_s(store: Store) -> float:
    began = time.monotonic()
    await store_time_us(store)
    return time.monotonic() - began


async def _turn_s() -> float:
    """How long this event loop takes to read what has arrived."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    here, there = socket.socketpair()
    with here, there:
        here.send(b"x")
        began = time.monotonic()
        loop.add_reader(there, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(there)
        return time.monotonic() - began
