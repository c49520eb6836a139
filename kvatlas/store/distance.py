"""How far away the store is, by the time that its quickest answers take."""

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
    near, only RECENT slow ones that it is far. Measured by calls of its own: those of a choice take time of the store's too."""

    def __init__(self, store: Store | None = None, every_s: float = EVERY_S) -> None:
        """`store` None: there is none, and nothing is far."""
        self._store = store
        self._every_s = every_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._task = BackgroundTask(self._run, "kvatlas store distance")

    def start(self) -> None:
        """Begin to measure."""
        if self._store is not None:
            self._task.start()

    async def stop(self) -> None:
        """Measure no more."""
        await self._task.stop()

    @property
    def round_trip_s(self) -> float:
        """0 until it is known."""
        return min(self._recent) if len(self._recent) == RECENT else 0.0

    def is_far(self, deadline_ms: float | None) -> bool:
        """Would the calls of a decision, one after the other, take longer than it may wait? Never without a deadline."""
        return deadline_ms is not None and CALLS_A_DECISION * self.round_trip_s * 1_000 > deadline_ms

    def record(self, seconds: float) -> None:
        """A round trip took so long."""
        self._recent.append(seconds)

    async def _run(self) -> None:
        assert self._store is not None
        while self._task.running:
            began = time.monotonic()
            try:
                await store_time_us(self._store)
            except STORE_FAILURES:
                # who is away is not far: the choices themselves find that out
                await asyncio.sleep(self._every_s)
            else:
                self.record(time.monotonic() - began)
            if len(self._recent) == RECENT:
                await asyncio.sleep(self._every_s)
