"""One scenario under way: its faults, and the wait until the index is exact again."""

from collections.abc import Iterable
from time import monotonic

from kvatlas.index.redis.index import open_redis_index
from tests.chaos.exactness import Comparison
from tests.chaos.fleet import Fleet, Worker
from tests.chaos.report import Outcome
from tests.eventually import until

EXACT_S = 180.0


class ScenarioRun:
    """Scenarios call `record_fault` when they break something, and `mark_healed` when everything runs again."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        self.fleet = fleet
        self.name = name
        self.faults: list[str] = []
        self.under_reporting: set[str] = set()
        """Workers that may hold more than their publishers can know about."""
        self.times_s: dict[str, float] = {}
        """Times that the scenario has measured, by description."""
        self._events_before = 0
        self._events_at_stop: dict[str, int] = {}
        self._answered_before = 0
        self._healed_s = monotonic()

    async def begin(self) -> None:
        """Resume the load, until `settle`."""
        self._answered_before = sum(self.fleet.load.answered.values())
        self._events_before = await self.fleet.events_sent()
        self.fleet.load.resume()

    def record_fault(self, what: str) -> None:
        self.faults.append(what)
        self._healed_s = monotonic()

    def mark_healed(self) -> None:
        """Start measuring the time until the index is exact."""
        self._healed_s = monotonic()

    async def wait_for_answers(self, answers: int = 10, workers: Iterable[Worker] | None = None) -> None:
        """Wait until each of these engines (default: all) has answered this many more requests."""
        for worker in workers if workers is not None else self.fleet.workers:
            await self.fleet.load.wait_for_answers(worker.worker_id, answers)

    async def settle(self) -> Outcome:
        """Pause the load, wait until the index is exact, and check it with `kvatlas export`. Raises AssertionError with the
        differences."""
        fleet = self.fleet
        await fleet.load.pause()
        last = Comparison("not compared yet")

        async def is_exact() -> bool:
            nonlocal last
            if problem := await fleet.checker.compare_digests():
                last = Comparison(problem)
            else:
                last = await fleet.checker.compare_index(self.under_reporting)
            return not last.problem

        try:
            await until(is_exact, deadline_s=EXACT_S, what="exact")
        except AssertionError:
            raise AssertionError(f"{self.name}: not exact after {EXACT_S:g} s: {last.problem}") from None
        exact_after_s = monotonic() - self._healed_s
        last = await fleet.checker.compare(await fleet.export(), self.under_reporting)
        assert not last.problem, f"{self.name}: {last.problem}"
        events = await fleet.events_sent()
        events -= self._events_before if events >= self._events_before else 0  # a restarted sidecar counts from 0
        return Outcome(
            self.name, self.faults, events, last.exported, exact_after_s, last.wrong, last.missing, self.times_s
        )

    async def wait_until_exact(self) -> None:
        """Pause the load until the index is exact."""
        await self.fleet.load.pause()
        last = Comparison("nothing compared yet")

        async def is_exact() -> bool:
            nonlocal last
            last = await self.fleet.checker.compare_index(self.under_reporting)
            return not last.problem

        try:
            await until(is_exact, deadline_s=EXACT_S, what="exact")
        except AssertionError:
            raise AssertionError(f"{self.name}: not exact after {EXACT_S:g} s: {last.problem}") from None
        self.fleet.load.resume()

    async def measure_lag_s(self) -> float:
        """The time until the index has applied the publishers' last messages."""
        began_s = monotonic()
        index = await open_redis_index(self.fleet.store, writer=False)
        for worker in self.fleet.workers:
            status = (await self.fleet.checker.status(worker.worker_id)).status or {}
            last = (status["incarnation"], status["acked_seq"])

            async def is_applied(worker_id: str = worker.worker_id, last: tuple[int, int] = last) -> bool:
                record = await index.record(worker_id)
                return record is not None and (record.incarnation, record.seq) >= last

            await until(is_applied, deadline_s=EXACT_S, what=f"the last message of {worker.worker_id} is applied")
        return monotonic() - began_s

    async def wait_until_exact_and_never_empty(self) -> None:
        """Wait until the index is exact. Raises AssertionError if a worker's blocks vanish meanwhile."""
        checker = self.fleet.checker

        async def is_exact() -> bool:
            for worker in self.fleet.workers:
                blocks = await checker.resident_blocks(worker.worker_id)
                assert blocks, f"{self.name}: the blocks of {worker.worker_id} vanished from the index"
            return not (await checker.compare_index(self.under_reporting)).problem

        await until(is_exact, deadline_s=EXACT_S, what=f"{self.name}: the index is repaired")

    async def assert_never_empty(self, worker: Worker) -> None:
        """Watch until cancelled. Raises AssertionError if the worker's blocks vanish from the index."""
        while True:
            blocks = await self.fleet.checker.resident_blocks(worker.worker_id)
            assert blocks, f"{self.name}: the blocks of {worker.worker_id} vanished from the index"
