"""One scenario under way: what was broken, and the wait until all is exact again."""

from collections.abc import Iterable
from time import monotonic

from nats.errors import Error as NatsError

from kvatlas.index.redis.index import open_redis_index
from tests.chaos.exactness import State
from tests.chaos.fleet import Fleet, Worker
from tests.chaos.report import Outcome
from tests.eventually import until

EXACT_S = 60.0


class Chaos:
    """Scenarios call `fault` when they break something, and `healed` when it is whole again."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.faults: list[str] = []
        self.under_reporting: set[str] = set()
        """Workers that may hold more than their publishers can know."""
        self.times_s: dict[str, float] = {}
        """What a scenario has timed, in words."""
        self._events_before = 0
        self._events_at_stop: dict[str, int] = {}
        self._answered_before = 0
        self._healed_s = monotonic()

    async def begin(self) -> None:
        """The load goes on until `settle`."""
        self._answered_before = sum(self.fleet.load.answered.values())
        self._events_before = await self.fleet.events_sent()
        self.fleet.load.go()

    def fault(self, what: str) -> None:
        self.faults.append(what)
        self._healed_s = monotonic()

    def healed(self) -> None:
        """The time to exact counts from here."""
        self._healed_s = monotonic()

    async def moved(self, answers: int = 10, workers: Iterable[Worker] | None = None) -> None:
        """Wait until these engines (all of them) did so much more."""
        for worker in workers if workers is not None else self.fleet.workers:
            await self.fleet.load.more(worker.worker_id, answers)

    async def settle(self) -> Outcome:
        """Rest, wait until all is exact, and have `kvatlas export` say so. Raises AssertionError with what is not."""
        fleet = self.fleet
        await fleet.load.rest()
        last = State("not looked yet")

        async def is_exact() -> bool:
            nonlocal last
            if trouble := await fleet.checker.glance():
                last = State(trouble)
            else:
                last = await fleet.checker.look(self.under_reporting)
            return not last.trouble

        try:
            await until(is_exact, deadline_s=EXACT_S, what="exact")
        except AssertionError:
            raise AssertionError(f"{self.name}: not exact after {EXACT_S:g} s: {last.trouble}") from None
        exact_after_s = monotonic() - self._healed_s
        last = await fleet.checker.compare(await fleet.export(), self.under_reporting)
        assert not last.trouble, f"{self.name}: {last.trouble}"
        events = await fleet.events_sent()
        events -= self._events_before if events >= self._events_before else 0  # sidecars started anew count anew
        return Outcome(
            self.name, self.faults, events, last.exported, exact_after_s, last.wrong, last.missing, self.times_s
        )

    async def is_exact_now(self) -> None:
        """At rest, in the middle of a scenario, all becomes exact. The load goes on afterwards."""
        await self.fleet.load.rest()

        async def is_right() -> bool:
            return not (await self.fleet.checker.look(self.under_reporting)).trouble

        await until(is_right, deadline_s=EXACT_S, what=f"{self.name}: the index is exact")
        self.fleet.load.go()

    async def lag_s(self) -> float:
        """How long it takes now until the index has what the publishers' last messages said."""
        began_s = monotonic()
        index = await open_redis_index(self.fleet.store, writer=False)
        for worker in self.fleet.workers:
            status = (await self.fleet.checker.status(worker.worker_id)).status or {}
            told = (status["incarnation"], status["acked_seq"])

            async def has_it(worker_id: str = worker.worker_id, told: tuple[int, int] = told) -> bool:
                record = await index.record(worker_id)
                return record is not None and (record.incarnation, record.seq) >= told

            await until(has_it, deadline_s=EXACT_S, what=f"what {worker.worker_id} told is applied")
        return monotonic() - began_s

    async def never_empty_until_exact(self) -> None:
        """Wait until the digests are right; raises AssertionError where a worker's residency vanishes meanwhile."""
        checker = self.fleet.checker

        async def is_right() -> bool:
            for worker in self.fleet.workers:
                blocks = await checker.resident_blocks(worker.worker_id)
                assert blocks, f"{self.name}: the blocks of {worker.worker_id} vanished from the index"
            return not (await checker.look(self.under_reporting)).trouble

        await until(is_right, deadline_s=EXACT_S, what=f"{self.name}: the index is repaired")

    async def watch_never_empty(self, worker: Worker) -> None:
        """Until cancelled; raises AssertionError where the worker's residency vanishes from the index."""
        while True:
            blocks = await self.fleet.checker.resident_blocks(worker.worker_id)
            assert blocks, f"{self.name}: the blocks of {worker.worker_id} vanished from the index"


async def answers(fleet: Fleet, worker: Worker) -> bool:
    """Does the worker's publisher answer on its control subject?"""
    try:
        await fleet.checker.status(worker.worker_id)
    except (NatsError, TimeoutError):
        return False
    return True
