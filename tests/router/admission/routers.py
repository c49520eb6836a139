"""Routers that share reservations and whose requests run on workers for a while."""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from secrets import token_bytes

from kvatlas.cost import Load
from kvatlas.errors import Unreachable
from kvatlas.reservations import (
    Booking,
    LoadReport,
    Outcome,
    QueueLimits,
    Reservations,
    Turns,
    WaitingRequest,
    WorkerReport,
)
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas.reservations.room_and_slo import Limit, Limits
from kvatlas_router.admission.queue import AdmissionQueue, QueueSettings, Wait
from router_client.errors import NoWorkers
from tests.kvatlas.reservations.asks import POOL, ask, id_of, offer

LEASE_US, LONGEST_US = 30_000_000, 600_000_000
PATIENT = QueueSettings(requests=500, tokens=10_000_000, wait_s=60)


@dataclass
class Pool:
    """Workers with one request slot each. `served`: (tenant, router) of each request in the order booked."""

    reservations: Reservations
    workers: tuple[str, ...]
    runs_s: float = 0.0
    served: list[tuple[str, str]] = field(default_factory=list)
    booked: int = 0
    resting: set[str] = field(default_factory=set)
    """Routers that see only workers that asked for a pause."""

    async def report(self) -> None:
        """Report the workers as idle, so only bookings count as load."""
        reports = {worker: WorkerReport(1, LoadReport(Load(), covers=False)) for worker in self.workers}
        await self.reservations.report(POOL, reports)

    async def keep_reporting(self) -> None:
        while True:
            with suppress(Unreachable):
                await self.report()
            await asyncio.sleep(1)


class Router:
    """One router's queue in front of a pool."""

    def __init__(self, pool: Pool, name: str, settings: QueueSettings) -> None:
        self.pool = pool
        self.name = name
        self.queue = AdmissionQueue(settings, self)
        self.running: list[int] = []

    async def turns(
        self, pool_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> tuple[Turns, bool]:
        return await self.pool.reservations.turns(pool_id, self.name, left, waiting), True

    async def admit(self, tenant: str, wait: Wait | None = None, wait_s: float | None = None, **fields: object) -> int:
        """Book a worker in turn. Returns the booking's number. Raises QueueFull."""
        settings = self.queue.settings
        limits = QueueLimits(settings.requests, settings.tokens)
        request = WaitingRequest(token_bytes(ID_BYTES), tenant, limits, 1_000, **fields)  # type: ignore[arg-type]

        async def book(as_it_waits: WaitingRequest, blocked: frozenset[str]) -> int | None:
            if self.name in self.pool.resting:
                return None
            workers = [worker for worker in self.pool.workers if worker not in blocked]
            if not workers:
                raise NoWorkers("all are blocked")
            room = Limits([Limit(1)] * len(workers), 1_000)
            asked = replace(ask([offer(worker) for worker in workers]), limits=room)
            self.pool.booked += 1
            number = self.pool.booked
            booking = Booking(id_of(number), self.name, 1_000, asked, LEASE_US, LONGEST_US, waiting=as_it_waits)
            try:
                assert await self.pool.reservations.book(POOL, booking) is not None
            except Unreachable:  # tried again at its turn
                return None
            self.pool.served.append((tenant, self.name))
            return number

        return await self.queue.admit(POOL, request, book, Wait() if wait is None else wait, wait_s)

    async def end(self, number: int) -> None:
        """End a booked request."""
        await self.pool.reservations.release(POOL, id_of(number), Outcome.FINISHED)
        self.queue.record_end(POOL)

    async def run(self, tenant: str, weight: float = 1.0) -> None:
        """Run a request: book it in turn, and end it after a while."""
        number = await self.admit(tenant, weight=weight)
        await asyncio.sleep(self.pool.runs_s)
        await self.end(number)


@asynccontextmanager
async def routers_of(pool: Pool, number: int, settings: QueueSettings = PATIENT) -> AsyncIterator[list[Router]]:
    """Routers in front of a pool whose workers report their load."""
    routers = [Router(pool, f"r{n}", settings) for n in range(number)]
    await pool.report()
    reporting = asyncio.create_task(pool.keep_reporting())
    try:
        yield routers
    finally:
        reporting.cancel()
        for router in routers:
            await router.queue.close()
