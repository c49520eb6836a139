"""A router's lease in each pool that it books in, and what it still has to tell the store."""

import asyncio
import logging
import time
from collections import deque
from secrets import token_hex
from socket import gethostname

from kvatlas.reservations import Outcome, Reservations
from router_client.counters import RouterCounters
from router_client.decision.fail_open import FAILING

BEATS_A_LEASE = 3
RETRY_S = 0.1
CLOSE_S = 1.0
MOST_LATER = 100_000

_log = logging.getLogger("router_client")


class Leases:
    """Renews the lease while the client is entered; without that a lease lasts from one booking to the next.

    What could not be told in time is told later, until the lease would have ended it anyway.
    """

    def __init__(
        self, reservations: Reservations, counters: RouterCounters, lease_s: float, router_id: str | None = None
    ) -> None:
        self.router_id = router_id or f"{gethostname()}-{token_hex(6)}"
        self.lease_us = round(lease_s * 1e6)
        self._lease_s = lease_s
        self._reservations = reservations
        self._counters = counters
        self._used: dict[str, float] = {}
        self._live: dict[str, int] = {}
        self._later: deque[tuple[str, bytes, Outcome | None, float]] = deque(maxlen=MOST_LATER)
        self._wake = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def booked(self, pool_id: str) -> None:
        """A reservation was made under this lease."""
        self._used[pool_id] = time.monotonic()
        self._live[pool_id] = self._live.get(pool_id, 0) + 1
        self._counters.booked += 1

    def ended(self, pool_id: str) -> None:
        """One was ended."""
        self._live[pool_id] -= 1
        self._counters.released += 1

    def later(self, pool_id: str, id: bytes, outcome: Outcome | None) -> None:
        """Tell the store as soon as it answers: how a reservation ended, or (None) that its first token is there."""
        self._later.append((pool_id, id, outcome, time.monotonic() + max(self._lease_s, 30.0)))
        self._wake.set()

    def start(self) -> None:
        """Begin to renew."""
        self._stopping = False
        self._task = asyncio.create_task(self._run(), name="kvatlas router leases")

    async def stop(self) -> None:
        """Give up every lease, with all that is still booked under it. Waits at most CLOSE_S for the store."""
        if self._task is not None:
            self._stopping = True
            self._wake.set()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._tell()
                for pool_id in self._used:
                    await self._reservations.end_lease(pool_id, self.router_id)
        except FAILING as error:
            _log.warning("reservations of %s end with their lease: %s", self.router_id, error)

    async def _run(self) -> None:
        beat_s = self._lease_s / BEATS_A_LEASE
        next_beat = time.monotonic() + beat_s
        while not self._stopping:  # Python 3.11's wait_for, inside redis-py, may swallow the cancellation
            try:
                async with asyncio.timeout(max(0.0, next_beat - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                next_beat = time.monotonic() + beat_s
                await self._beat()
            self._wake.clear()
            try:
                await self._tell()
            except FAILING:
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _beat(self) -> None:
        for pool_id, live in list(self._live.items()):
            if not live:
                continue
            try:
                async with asyncio.timeout(self._lease_s / BEATS_A_LEASE):
                    lived = await self._reservations.renew_lease(pool_id, self.router_id, self.lease_us)
            except FAILING as error:
                _log.warning("lease of %s not renewed: %s", self.router_id, error)
            else:
                self._counters.lapsed += not lived

    async def _tell(self) -> None:
        """Raises what the store raises; what it was about is kept."""
        while self._later:
            pool_id, id, outcome, until = self._later[0]
            if time.monotonic() < until:
                async with asyncio.timeout(CLOSE_S):
                    if outcome is None:
                        await self._reservations.record_first_token(pool_id, id)
                    else:
                        await self._reservations.release(pool_id, id, outcome)
            self._later.popleft()
