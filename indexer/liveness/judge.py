"""Which workers live, as routers are to see it (pure; times are the caller's seconds of a clock that never goes back).

A worker without a heartbeat for LOST_AFTER_S is lost: routers skip it. After RETIRE_AFTER_S it is retired: what it
held is dropped. Nobody is retired while most of the fleet fell silent at once: then it is rather the observer who
hears nothing.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from kvatlas.fleet.records import EngineEndpoint, EngineState, FleetRecord, Heartbeat, Liveness, WorkerState

LOST_AFTER_S = 5.0
RETIRE_AFTER_S = 60.0
AT_ONCE_S = 10.0
"""Workers that fell silent within so long of each other did so at once."""
FEWEST_AT_ONCE = 3
"""Fewer than these are retired even if they are most of the fleet: should it be wrong, it costs two snapshots."""
BLIND_FOR_S = 600.0
"""After so long without a heartbeat a worker is retired whatever else fell silent: the fleet was switched off."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """A worker to be retired: its state in the index, and its record in its pool (None: it has none)."""

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


class LivenessJudge:
    """Hears every worker of the fleet, judges those of the owned partitions."""

    def __init__(self, retire_after_s: float = RETIRE_AFTER_S) -> None:
        self._retire_after_s = retire_after_s
        self._workers: dict[str, _Worker] = {}
        self._changed: set[str] = set()
        self._pulses: dict[str, float] = {}
        self._unheard: dict[str, float] = {}
        self.lost = 0
        """Workers lost so far; one that comes back may be lost again."""
        self.held_back = 0
        """Retirements held back at the last tick because most of the fleet fell silent."""

    def pulse(self, worker_id: str, now_s: float) -> None:
        """Some worker of the fleet was heard, also one of another replica's."""
        self._pulses[worker_id] = now_s

    def adopt(self, records: Mapping[str, FleetRecord], now_s: float) -> None:
        """Workers of newly owned partitions as the previous owner left them. Their clocks start now."""
        for worker_id, record in records.items():
            self._pulses.setdefault(worker_id, now_s)
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

    def pool_of(self, worker_id: str) -> str | None:
        """The pool of a judged worker; None of any other."""
        worker = self._workers.get(worker_id)
        return worker.endpoint.pool_id if worker is not None else None

    def held(self, worker_ids: Collection[str], now_s: float) -> None:
        """The owned workers that the index has not retired. Those that nobody was heard of, nor knows as a member of the
        fleet (retired, and a late message brought them back; or their record was lost), are clocked from now on."""
        for worker_id in [w for w in self._unheard if w not in worker_ids or w in self._workers]:
            del self._unheard[worker_id]
        for worker_id in worker_ids:
            if worker_id not in self._workers and worker_id not in self._unheard:
                self._unheard[worker_id] = now_s
                self._pulses.setdefault(worker_id, now_s)

    def hear(self, beat: Heartbeat, now_s: float, now_us: int) -> bool:
        """A heartbeat of an owned worker. True where routers should know at once: the worker is new or back, or its
        engine's state or endpoint changed. Of two publishers of one worker the higher incarnation counts."""
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

    def forget(self, of: Callable[[str], bool]) -> None:
        """Judge these workers no more: their partition is another's, or they are retired."""
        for worker_id in [w for w in self._workers if of(w)]:
            del self._workers[worker_id]
            self._changed.discard(worker_id)
        for worker_id in [w for w in self._unheard if of(w)]:
            del self._unheard[worker_id]

    def slept(self, seconds: float, now_s: float) -> None:
        """The judge itself was stopped for so long (its process was paused, its machine asleep): what it did not hear
        meanwhile says nothing of any worker."""
        for worker in self._workers.values():
            worker.heard_s = min(now_s, worker.heard_s + seconds)
        for clocks in (self._pulses, self._unheard):
            for worker_id, at_s in clocks.items():
                clocks[worker_id] = min(now_s, at_s + seconds)

    def tick(self, now_s: float) -> list[Retirement]:
        """Marks workers lost, and names those to be retired; these are named again until they are forgotten."""
        due: list[tuple[Retirement, float]] = []
        for worker_id, worker in self._workers.items():
            silent_s = now_s - worker.heard_s
            if silent_s > LOST_AFTER_S and worker.liveness is Liveness.ALIVE:
                worker.liveness = Liveness.LOST
                self._changed.add(worker_id)
                self.lost += 1
            if silent_s > self._retire_after_s:
                due.append((Retirement(worker_id, worker.endpoint.pool_id), worker.heard_s))
        for worker_id, since_s in self._unheard.items():
            if now_s - since_s > self._retire_after_s and worker_id not in self._workers:
                due.append((Retirement(worker_id, None), since_s))
        for worker_id in [w for w, at_s in self._pulses.items() if now_s - at_s > BLIND_FOR_S]:
            del self._pulses[worker_id]
        pulses = sorted(self._pulses.values()) if due else []
        retirements = [
            retirement
            for retirement, heard_s in due
            if now_s - heard_s > BLIND_FOR_S or not _most_fell_silent(pulses, heard_s, now_s)
        ]
        self.held_back = len(due) - len(retirements)
        return retirements

    def take_changed(self, traces: Mapping[str, str] | None = None) -> dict[str, FleetRecord]:
        """The records of workers heard or changed since the last call. `traces`: W3C traceparent of the last applied
        batch by worker."""
        changed = {worker_id: self._record(worker_id, (traces or {}).get(worker_id)) for worker_id in self._changed}
        self._changed.clear()
        return changed

    def keep_changed(self, worker_ids: Mapping[str, FleetRecord]) -> None:
        """These could not be written: `take_changed` gives them again, as they are then."""
        self._changed.update(worker_id for worker_id in worker_ids if worker_id in self._workers)

    def lost_records(self, traces: Mapping[str, str]) -> dict[str, FleetRecord]:
        """Of lost workers, which `take_changed` names only once."""
        lost = [worker_id for worker_id, worker in self._workers.items() if worker.liveness is Liveness.LOST]
        return {worker_id: self._record(worker_id, traces.get(worker_id)) for worker_id in lost}

    @property
    def workers(self) -> dict[str, Liveness]:
        """Every judged worker."""
        return {worker_id: worker.liveness for worker_id, worker in self._workers.items()}

    def _record(self, worker_id: str, trace: str | None) -> FleetRecord:
        worker = self._workers[worker_id]
        return FleetRecord(
            endpoint=worker.endpoint,
            state=worker.state,
            liveness=worker.liveness,
            load=worker.load,
            incarnation=worker.incarnation,
            heard_us=worker.heard_us,
            load_age_us=worker.load_age_us,
            trace=trace,
        )


def _most_fell_silent(pulses: list[float], at_s: float, now_s: float) -> bool:
    """Did most of the workers heard until about `at_s` never be heard again? `pulses`: last heard, ascending."""
    first = bisect_left(pulses, at_s - AT_ONCE_S)
    after = bisect_left(pulses, min(at_s + AT_ONCE_S, now_s - LOST_AFTER_S))
    silent, lived = after - first, len(pulses) - first
    return silent >= FEWEST_AT_ONCE and 2 * silent > lived
