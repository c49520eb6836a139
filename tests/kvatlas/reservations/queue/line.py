"""Routers that book for requests which may wait."""

from dataclasses import dataclass, field, replace

from kvatlas.cost import Load
from kvatlas.reservations import (
    Ask,
    Booking,
    LoadReport,
    MustWait,
    Outcome,
    QueueLimits,
    Reservations,
    WaitingRequest,
    WorkerReport,
)
from kvatlas.reservations.room_and_slo import Limit, Limits
from kvatlas.reservations.waiting_request import Place
from tests.kvatlas.reservations.asks import LEASE_US, LONGEST_US, POOL, Clock, ask, id_of, offer

LIMITS = QueueLimits(100, 1_000_000)


def slots(*workers: str, slots: int = 1) -> Ask:
    """An ask for workers with this many request slots."""
    asked = ask([offer(worker) for worker in workers])
    return replace(asked, limits=Limits([Limit(slots)] * len(workers), 1_000))


@dataclass
class Line:
    """Routers that book for requests which may wait."""

    reservations: Reservations
    clock: Clock
    workers: tuple[str, ...] = ("a",)
    number: int = 0
    requests: dict[int, tuple[str, WaitingRequest, Ask]] = field(default_factory=dict)

    async def idle(self) -> None:
        """Report every worker as idle, so that its load is known."""
        reports = {id: WorkerReport(1, LoadReport(Load(), covers=False)) for id in self.workers}
        await self.reservations.report(POOL, reports)

    async def ask(
        self,
        tenant: str = "t",
        router: str = "r",
        *,
        workers: tuple[str, ...] | None = None,
        tokens: int = 1_000,
        limits: QueueLimits = LIMITS,
        **fields: object,
    ) -> tuple[int, str | Place]:
        """Ask for a worker. Returns the request's number, and the worker or a place. Raises QueueIsFull."""
        self.number += 1
        waiting = WaitingRequest(id_of(1_000_000 + self.number), tenant, limits, tokens, **fields)  # type: ignore[arg-type]
        if workers is not None:
            waiting = waiting.among(workers)
        self.requests[self.number] = (router, waiting, slots(*(workers or self.workers)))
        return self.number, await self.retry(self.number)

    async def retry(self, number: int) -> str | Place:
        """Try a request again. Returns the worker where it is booked, its place, or that it was called off before."""
        router, waiting, asked = self.requests[number]
        booking = Booking(id_of(number), router, waiting.input_tokens, asked, LEASE_US, LONGEST_US, waiting=waiting)
        try:
            found = await self.reservations.book(POOL, booking)
        except MustWait as error:
            return error.place
        return "called off" if found is None else found.worker_id

    async def release(self, number: int, output_tokens: int | None = None, outcome: Outcome = Outcome.FINISHED) -> None:
        await self.reservations.release(POOL, id_of(number), outcome, output_tokens)

    async def turns(self, router: str = "r") -> list[int]:
        """The numbers of a router's requests that may be tried."""
        found = await self.reservations.turns(POOL, router, [], [])
        return sorted(int.from_bytes(id, "big") - 1_000_000 for id in found.turns)

    async def serve(self, last: int, stuck: int = 0) -> list[int]:
        """Free the slot of one request after another, until nothing but a stuck request waits. Returns their numbers in the
        order served."""
        served: list[int] = []
        while True:
            await self.release(last)
            routers = {router for router, _, _ in self.requests.values()}
            first = [number for router in sorted(routers) for number in await self.turns(router) if number != stuck]
            if not first:
                return served
            last = first[0]
            assert await self.retry(last) in self.workers
            served.append(last)
            for router in sorted(routers):  # the following ones find no room
                for number in await self.turns(router):
                    await self.retry(number)
