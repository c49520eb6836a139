"""A router's lease in each pool in which it books, and reports that the store has not received yet.

No request waits until the store has recorded its first token or its end: reports are queued and sent together.
"""

import asyncio
import logging
import time
from collections import deque
from secrets import token_hex
from socket import gethostname
from typing import NamedTuple

from kvatlas.reservations import Outcome, Reservations
from kvatlas.reservations.protocol import BookingEnd
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from router_client.counters import RouterCounters

BEATS_A_LEASE = 3
RETRY_S = 0.1
CLOSE_S = 1.0
KEEP_S = 30.0
"""How long a report is retried (or for the length of a lease, if that is longer). By then, the lease has run out, which
ends the reservation anyway."""
MOST_PENDING = 100_000
LINGER_S = 0.001
"""Reports that arrive within this time of each other are sent together."""
MOST_TOGETHER = 256

_log = logging.getLogger("router_client")


class _PendingReport(NamedTuple):
    pool_id: str
    id: bytes
    outcome: Outcome | None
    until_s: float
    output_tokens: int | None


class Leases:
    """Renews leases and sends reports while the client is entered; otherwise a lease lasts from one booking to the next.

    A report that the store did not receive is repeated.
    """

    def __init__(
        self, reservations: Reservations, counters: RouterCounters, lease_s: float, router_id: str | None = None
    ) -> None:
        self.router_id = router_id or f"{gethostname()}-{token_hex(6)}"
        self.lease_us = round(lease_s * 1e6)
        self._lease_s = lease_s
        self._reservations = reservations
        self._counters = counters
        self._live: dict[str, int] = {}
        self._pending: deque[_PendingReport] = deque(maxlen=MOST_PENDING)
        self._wake = asyncio.Event()
        self._task = BackgroundTask(self._run, "kvatlas router leases")

    def record_booking(self, pool_id: str) -> None:
        """Record that a reservation was made under this lease."""
        self._live[pool_id] = self._live.get(pool_id, 0) + 1
        self._counters.booked += 1

    def record_release(self, pool_id: str) -> None:
        """Record that a reservation under this lease was ended."""
        self._live[pool_id] -= 1
        self._counters.released += 1

    @property
    def sends_reports(self) -> bool:
        """True if a reservation may hand its reports to `report_later`. False if nothing sends reports, or if they stay in
        this process."""
        return self._task.running and self._reservations.fed_by_indexer

    def report_later(self, pool_id: str, id: bytes, outcome: Outcome | None, output_tokens: int | None = None) -> None:
        """Report to the store soon, or once it answers again, how a reservation ended or (None) that its first token has
        arrived."""
        until_s = time.monotonic() + max(self._lease_s, KEEP_S)
        self._pending.append(_PendingReport(pool_id, id, outcome, until_s, output_tokens))
        self._wake.set()

    def start(self) -> None:
        """Start renewing leases and sending reports."""
        self._task.start()

    async def stop(self) -> None:
        """Release every lease, and all bookings under it. Waits at most CLOSE_S for the store."""
        await self._task.stop()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._report_pending()
                for pool_id in self._live:
                    await self._reservations.end_lease(pool_id, self.router_id)
        except STORE_FAILURES as error:
            _log.warning(
                "router %s: lease was not released (%s); its reservations end when the lease expires",
                self.router_id,
                reason(error),
            )

    async def _run(self) -> None:
        beat_s = self._lease_s / BEATS_A_LEASE
        next_beat = time.monotonic() + beat_s
        while self._task.running:
            try:
                async with asyncio.timeout(max(0.0, next_beat - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                next_beat = time.monotonic() + beat_s
                await self._renew()
            if self._pending:
                await asyncio.sleep(LINGER_S)
            self._wake.clear()
            try:
                await self._report_pending()
            except STORE_FAILURES:
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _renew(self) -> None:
        for pool_id, live in list(self._live.items()):
            if not live:
                continue
            try:
                async with asyncio.timeout(self._lease_s / BEATS_A_LEASE):
                    still_held = await self._reservations.renew_lease(pool_id, self.router_id, self.lease_us)
            except STORE_FAILURES as error:
                _log.warning(
                    "router %s: lease in pool %s was not renewed (%s); trying again in %g s",
                    self.router_id,
                    pool_id,
                    reason(error),
                    self._lease_s / BEATS_A_LEASE,
                )
            else:
                self._counters.lapsed += not still_held

    async def _report_pending(self) -> None:
        """Send the queued reports. Raises whatever the store raises; unconfirmed reports are kept."""
        while self._pending:
            taken = [self._pending.popleft() for _ in range(min(len(self._pending), MOST_TOGETHER))]
            now_s = time.monotonic()
            by_pool: dict[str, list[_PendingReport]] = {}
            for report in taken:
                if now_s < report.until_s:
                    by_pool.setdefault(report.pool_id, []).append(report)
            try:
                for pool_id in list(by_pool):
                    async with asyncio.timeout(CLOSE_S):
                        ends = [BookingEnd(one.id, one.outcome, one.output_tokens) for one in by_pool[pool_id]]
                        await self._reservations.record_ends(pool_id, ends)
                    del by_pool[pool_id]
            finally:
                kept = [report for reports in by_pool.values() for report in reports]
                self._pending.extendleft(reversed(kept))
