"""Measures how far away the store is, by its quickest answers."""

import asyncio
import time
from collections import deque

from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store
from kvatlas.store.deadline import CALLS_A_DECISION, STORE_FAILURES

EVERY_S = 1.0
RECENT = 5


class StoreDistance:
    """The shortest of the last RECENT round trips: it waited least for a busy machine. One quick answer shows that the store is
    near, only RECENT slow ones that it is far. Measured with its own calls, because those of a choice include the store's
    computing."""

    def __init__(self, store: Store | None = None, every_s: float = EVERY_S) -> None:
        """`store=None`: there is no store, so nothing is far."""
        self._store = store
        self._every_s = every_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._task = BackgroundTask(self._run, "kvatlas store distance")

    def start(self) -> None:
        """Start measuring."""
        if self._store is not None:
            self._task.start()

    async def stop(self) -> None:
        """Measure no more."""
        await self._task.stop()

    @property
    def round_trip_s(self) -> float:
        """The round trip in seconds; 0 until it is known."""
        return min(self._recent) if len(self._recent) == RECENT else 0.0

    def is_far(self, deadline_ms: float | None) -> bool:
        """True if the calls of a decision, one after another, would take longer than it may wait. Always False without a
        deadline."""
        return deadline_ms is not None and CALLS_A_DECISION * self.round_trip_s * 1_000 > deadline_ms

    def record(self, seconds: float) -> None:
        """Record the duration of a round trip."""
        self._recent.append(seconds)

    async def _run(self) -> None:
        assert self._store is not None
        while self._task.running:
            began = time.monotonic()
            try:
                await store_time_us(self._store)
            except STORE_FAILURES:
                # a store that is down is not far: choices find that out themselves
                await asyncio.sleep(self._every_s)
            else:
                self.record(time.monotonic() - began)
            if len(self._recent) == RECENT:
                await asyncio.sleep(self._every_s)
