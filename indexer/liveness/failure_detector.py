"""Decides for routers which workers are alive (pure; times are in seconds of the caller's monotonic clock).

A worker is lost after LOST_AFTER_S without a heartbeat: routers skip it. After RETIRE_AFTER_S it is retired: its blocks are
dropped. No worker is retired if most of the fleet fell silent at the same time, because this replica itself may be cut off.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from kvatlas.fleet.records import EngineEndpoint, EngineState, FleetRecord, Heartbeat, Liveness, Repair, WorkerState

LOST_AFTER_S = 5.0
RETIRE_AFTER_S = 60.0
AT_ONCE_S = 10.0
"""Workers that fell silent within this many seconds of each other count as silent at the same time."""
FEWEST_AT_ONCE = 3
"""A smaller number of workers is retired even if it is most of the fleet, because a mistake then costs at most two
snapshots."""
BLIND_FOR_S = 600.0
"""After this long without a heartbeat, a worker is retired in any case, because the fleet must have been switched off."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """A worker to retire, and the pool that holds its record (None: no pool holds one)."""

    worker_id: str
    pool_id: str | None


@dataclass(slots=True)
class _Worker:
    endpoint: EngineEndpoint
    state: EngineState
    liveness: Liveness
    load: WorkerState | None
    incarnation: int
    heard_us: int
    heard_s: float
    load_age_us: int | None = None


@dataclass(slots=True)
class _Notes:
    """The rest of what a worker's record holds."""

    applied_us: int = 0
    trace: str | None = None
    repair: Repair | None = None


_NO_NOTES = _Notes()


class FailureDetector:
    """Judges the workers of the owned partitions, and tracks when each worker of the fleet was last heard from."""

    def __init__(
        self,
        retire_after_s: float = RETIRE_AFTER_S,
        *,
        vouches: Callable[[str], bool] | None = None,
        tenants_of: Callable[[str], tuple[str, ...]] = lambda _: (),
        describe_doubt: Callable[[str], str] = lambda _: "",
    ) -> None:
        """`vouches`: true if this worker's address has been checked against its publisher's identity. `tenants_of`: the
        tenants whose prompts this identity allows a worker to receive. `describe_doubt`: a human-readable reason why
        the index may be wrong about a worker."""
        self._vouches = vouches
        self._tenants_of = tenants_of
        self._describe_doubt = describe_doubt
        self._retire_after_s = retire_after_s
        self._workers: dict[str, _Worker] = {}
        self._changed: set[str] = set()
        self._last_heard_s: dict[str, float] = {}
        self._unheard_since_s: dict[str, float] = {}
        self._notes: dict[str, _Notes] = {}
        self.lost = 0
        """Number of workers lost so far; a worker that comes back may be lost again."""
        self.held_back = 0
        """Number of retirements that the last round held back because most of the fleet had fallen silent."""

    def record_pulse(self, worker_id: str, now_s: float) -> None:
        """Record that a worker of the fleet was heard from; another replica may own it."""
        self._last_heard_s[worker_id] = now_s

    def adopt(self, records: Mapping[str, FleetRecord], now_s: float) -> None:
        """Start judging the workers of newly owned partitions too, from their last records. Their clocks start now."""
        for worker_id, record in records.items():
            self._last_heard_s.setdefault(worker_id, now_s)
            if worker_id not in self._workers:
                self._workers[worker_id] = _Worker(
                    record.endpoint,
                    record.state,
                    record.liveness,
                    record.load,
                    record.incarnation,
                    record.heard_us,
                    now_s,
                    record.load_age_us,
                )
                self._notes.setdefault(worker_id, _Notes(record.applied_us, record.trace, record.repair))

    def pool_of(self, worker_id: str) -> str | None:
        """The pool of a worker that is judged here; None for any other worker."""
        worker = self._workers.get(worker_id)
        return worker.endpoint.pool_id if worker is not None else None

    def watch(self, worker_ids: Collection[str], now_s: float) -> None:
        """Pass all owned workers that the index has not retired. For workers that are not judged yet, the clock starts now:
        these are retired workers that a late message brought back, or workers whose fleet record was lost."""
        for worker_id in [w for w in self._unheard_since_s if w not in worker_ids or w in self._workers]:
            del self._unheard_since_s[worker_id]
        for worker_id in worker_ids:
            if worker_id not in self._workers and worker_id not in self._unheard_since_s:
                self._unheard_since_s[worker_id] = now_s
                self._last_heard_s.setdefault(worker_id, now_s)

    def hear(self, beat: Heartbeat, now_s: float, now_us: int) -> bool:
        """Record a heartbeat of an owned worker. Returns True if routers should hear of it immediately: the worker is new or
        back, or its engine's state or endpoint has changed. If a worker has two publishers, the higher incarnation counts."""
        worker = self._workers.get(beat.worker_id)
        if worker is not None and beat.incarnation < worker.incarnation and now_s - worker.heard_s < LOST_AFTER_S:
            return False
        urgent = (
            worker is None
            or worker.liveness is not Liveness.ALIVE
            or worker.state is not beat.state
            or worker.endpoint != beat.endpoint
        )
        age_us = max(0, beat.sent_us - beat.load.sampled_us) if beat.load is not None and beat.sent_us else None
        self._workers[beat.worker_id] = _Worker(
            beat.endpoint, beat.state, Liveness.ALIVE, beat.load, beat.incarnation, now_us, now_s, age_us
        )
        self._changed.add(beat.worker_id)
        return urgent

    def record_applied(self, worker_ids: Iterable[str], traces: Mapping[str, str], now_us: int) -> None:
        """Record that messages of these workers were applied. `traces`: for each worker, the W3C traceparent of the last
        applied batch that began in an engine, if this replica traces."""
        for worker_id in worker_ids:
            self._notes_of(worker_id).applied_us = now_us
        for worker_id, trace in traces.items():
            self._notes_of(worker_id).trace = trace

    def record_repair(self, worker_id: str, repair: Repair) -> None:
        """Record that a snapshot of this worker was requested."""
        self._notes_of(worker_id).repair = repair

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the workers that are retired or whose partitions now belong to another replica."""
        for worker_id in [w for w in self._workers if is_gone(w)]:
            del self._workers[worker_id]
            self._changed.discard(worker_id)
        for worker_id in [w for w in self._unheard_since_s if is_gone(w)]:
            del self._unheard_since_s[worker_id]
        for worker_id in [w for w in self._notes if is_gone(w)]:
            del self._notes[worker_id]

    def skip_pause(self, seconds: float, now_s: float) -> None:
        """Ignore a period in which this process itself stood still (because it was paused, or its machine slept)."""
        for worker in self._workers.values():
            worker.heard_s = min(now_s, worker.heard_s + seconds)
        for clocks in (self._last_heard_s, self._unheard_since_s):
            for worker_id, at_s in clocks.items():
                clocks[worker_id] = min(now_s, at_s + seconds)

    def detect(self, now_s: float) -> list[Retirement]:
        """Mark silent workers as lost. Returns the workers to retire; each is returned in every round until it is forgotten."""
        due: list[tuple[Retirement, float]] = []
        for worker_id, worker in self._workers.items():
            silent_s = now_s - worker.heard_s
            if silent_s > LOST_AFTER_S and worker.liveness is Liveness.ALIVE:
                worker.liveness = Liveness.LOST
                self._changed.add(worker_id)
                self.lost += 1
            if silent_s > self._retire_after_s:
                due.append((Retirement(worker_id, worker.endpoint.pool_id), worker.heard_s))
        for worker_id, since_s in self._unheard_since_s.items():
            if now_s - since_s > self._retire_after_s and worker_id not in self._workers:
                due.append((Retirement(worker_id, None), since_s))
        for worker_id in [w for w, at_s in self._last_heard_s.items() if now_s - at_s > BLIND_FOR_S]:
            del self._last_heard_s[worker_id]
        last_heard_s = sorted(self._last_heard_s.values()) if due else []
        retirements = [
            retirement
            for retirement, heard_s in due
            if now_s - heard_s > BLIND_FOR_S or not _most_fell_silent(last_heard_s, heard_s, now_s)
        ]
        self.held_back = len(due) - len(retirements)
        return retirements

    def take_changed(self) -> dict[str, FleetRecord]:
        """The records of the workers that were heard from or changed since the last call."""
        changed = {worker_id: self._record(worker_id) for worker_id in self._changed}
        self._changed.clear()
        return changed

    def restore_changed(self, changed: Mapping[str, FleetRecord]) -> None:
        """After a failed write, mark these workers as changed, so that the next `take_changed` returns the records that they
        have by then."""
        self._changed.update(worker_id for worker_id in changed if worker_id in self._workers)

    def lost_records(self) -> dict[str, FleetRecord]:
        """The records of lost workers, which `take_changed` returns only once."""
        lost = [worker_id for worker_id, worker in self._workers.items() if worker.liveness is Liveness.LOST]
        return {worker_id: self._record(worker_id) for worker_id in lost}

    @property
    def lost_now(self) -> int:
        """Number of lost workers, not counting those that announced their departure."""
        lost = (one for one in self._workers.values() if one.liveness is Liveness.LOST)
        return sum(one.state is not EngineState.DRAINING for one in lost)

    @property
    def workers(self) -> dict[str, Liveness]:
        return {worker_id: worker.liveness for worker_id, worker in self._workers.items()}

    def _record(self, worker_id: str) -> FleetRecord:
        worker, notes = self._workers[worker_id], self._notes.get(worker_id, _NO_NOTES)
        return FleetRecord(
            endpoint=worker.endpoint,
            state=worker.state,
            liveness=worker.liveness,
            load=worker.load,
            incarnation=worker.incarnation,
            heard_us=worker.heard_us,
            load_age_us=worker.load_age_us,
            trace=notes.trace,
            vouched=self._vouches is not None and self._vouches(worker_id),
            tenants=self._tenants_of(worker_id),
            applied_us=notes.applied_us,
            doubt=self._describe_doubt(worker_id),
            repair=notes.repair,
        )

    def _notes_of(self, worker_id: str) -> _Notes:
        if (notes := self._notes.get(worker_id)) is None:
            notes = self._notes[worker_id] = _Notes()
        return notes


def _most_fell_silent(last_heard_s: list[float], at_s: float, now_s: float) -> bool:
    """True if most of the workers that were alive at `at_s` were last heard from at about that time. `last_heard_s` is
    ascending."""
    first = bisect_left(last_heard_s, at_s - AT_ONCE_S)
    after = bisect_left(last_heard_s, min(at_s + AT_ONCE_S, now_s - LOST_AFTER_S))
    silent, alive = after - first, len(last_heard_s) - first
    return silent >= FEWEST_AT_ONCE and 2 * silent > alive
