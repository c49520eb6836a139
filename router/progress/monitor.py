"""The progress of all engines: evidence from answers and fleet records, probes, and moves of requests to other engines.

Each router judges by its own observations. Within seconds, an engine's counters also show work that it does for other
routers.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from kvatlas.fleet.records import FleetRecord
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.store.connection import reason
from kvatlas.store.deadline import STORE_FAILURES
from kvatlas.telemetry import export_metrics
from kvatlas.telemetry.metric_export import MetricSource
from kvatlas_router.progress import expected_times
from kvatlas_router.progress.engine_progress import EngineProgress, Probe, State
from kvatlas_router.progress.expected_times import ExpectedTimes
from kvatlas_router.progress.watched_attempt import SentAttempt, WatchedAttempt

EVERY_S = 0.1
LATE_S = 0.2
"""If a check comes later than this, the router itself was paused."""
RECORDS_S = 1.0
MOST_AGE_S = 10.0

_log = logging.getLogger("kvatlas_router.proxy")

Records = Callable[[], Awaitable[Mapping[str, FleetRecord]]]
SendProbe = Callable[[FleetRecord], Awaitable[Probe]]


@dataclass(slots=True)
class ProgressCounters:
    """Plain integers since the router started. `stalls`: how often an engine with work stopped making progress; `returns`: how
    often a stalled engine resumed. `probes`: our own small, real requests. `moved`: requests that left a stalled engine,
    either before their first byte or as streams that continued elsewhere."""

    stalls: int = 0
    returns: int = 0
    probes: int = 0
    moved: int = 0


@dataclass(slots=True)
class _Engine:
    """`series`: its metric. `reported`: it has been reported as stalled, at `stalled_at`. `seen`: the evidence in its
    last record."""

    pool_id: str
    progress: EngineProgress = field(default_factory=EngineProgress)
    attempts: dict[int, WatchedAttempt] = field(default_factory=dict)
    probe: "asyncio.Task[None] | None" = None
    series: MetricSource | None = None
    reported: bool = False
    stalled_at: float = 0.0
    seen: object = None

    @property
    def stalled(self) -> int:
        """The metric's value."""
        return int(self.reported)


class ProgressMonitor:
    """Watches the progress of all engines. Can be shared between tasks of one event loop."""

    def __init__(self, records: Records, send_probe: SendProbe, clock: Callable[[], float] = time.monotonic) -> None:
        """`records`: returns the fleet's workers by id; the object stays the same until they have been read again."""
        self.counters = ProgressCounters()
        self._read = records
        self._send_probe = send_probe
        self._clock = clock
        self._engines: dict[str, _Engine] = {}
        self._stalled: dict[str, _Engine] = {}
        """Workers reported as stalled. Kept separately because every request looks them up, and a scan of all engines would
        take too long."""
        self._times: dict[str, ExpectedTimes] = {}
        self._records: Mapping[str, FleetRecord] = {}
        self._read_at = float("-inf")
        self._looked_at: float | None = None
        self._task = BackgroundTask(self._run, "kvatlas progress of engines")

    def start(self) -> None:
        """Start watching."""
        self._task.start()

    async def stop(self) -> None:
        """Stop watching."""
        await self._task.stop()
        probes = [engine.probe for engine in self._engines.values() if engine.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for worker_id in list(self._engines):
            self._forget(worker_id)

    # ------------------------------------------------------------ requests

    def send(self, sent: SentAttempt, task: "asyncio.Task[object] | None" = None) -> WatchedAttempt:
        """Watch a request to an engine until `end` or `leave` is called. `task`: the task that waits for the answer; it
        is cancelled to move the request elsewhere."""
        watched = WatchedAttempt(self, sent, task)
        if sent.computes:
            now = self._clock()
            engine = self._engine(sent)
            engine.attempts[id(watched)] = watched
            bounds = self._times_of(sent.pool_id).bounds(sent.kind, sent.predicted_s, now)
            engine.progress.send(id(watched), bounds, now)
        return watched

    def receive(self, watched: WatchedAttempt) -> None:
        """Record a computed part of the answer; see `WatchedAttempt.progress`."""
        sent, engine, now = watched.sent, self._engines.get(watched.sent.worker_id), self._clock()
        if engine is None or not sent.computes:
            return
        progress = engine.progress
        quiet_s = 0.0 if progress.is_stalled else progress.quiet_s(now)
        first_s = progress.receive(id(watched), now)
        if first_s is None and quiet_s < expected_times.LEAST_SUSPECT_S:
            return  # almost always
        times = self._times_of(sent.pool_id)
        times.add_silence(quiet_s, now)
        if first_s is not None and times.add(sent.kind, sent.predicted_s, first_s):
            self._renew_bounds(sent.pool_id, times, now)

    def _renew_bounds(self, pool_id: str, times: ExpectedTimes, now: float) -> None:
        """Set the bounds of requests that were sent before the pool's times were known."""
        for engine in self._engines.values():
            if engine.pool_id == pool_id:
                attempts = {key: watched.sent for key, watched in engine.attempts.items()}
                engine.progress.renew(
                    {key: times.bounds(sent.kind, sent.predicted_s, now) for key, sent in attempts.items()}
                )

    def close(self, watched: WatchedAttempt, *, left: bool) -> None:
        """Stop watching a request; see `WatchedAttempt.end` and `WatchedAttempt.leave`."""
        engine = self._engines.get(watched.sent.worker_id)
        if engine is not None and engine.attempts.pop(id(watched), None) is not None:
            end = engine.progress.leave if left else engine.progress.end
            end(id(watched), self._clock())

    def count_move(self) -> None:
        """Count a stream that has continued elsewhere; see `WatchedAttempt.move`."""
        self.counters.moved += 1

    # ------------------------------------------------------------ use

    def stalled_in(self, pool_id: str) -> frozenset[str]:
        """The pool's workers that should get no request now."""
        now = self._clock()
        return frozenset(
            id for id, one in self._stalled.items() if one.pool_id == pool_id and one.progress.refuses(now)
        )

    def stalled(self) -> Mapping[str, float]:
        """Stalled workers in all pools, with the seconds that each has been without progress."""
        now = self._clock()
        return {id: one.progress.quiet_s(now) for id, one in list(self._stalled.items())}

    def stalled_by_pool(self) -> Mapping[str, tuple[str, ...]]:
        """Stalled workers by pool."""
        found: dict[str, tuple[str, ...]] = {}
        for worker_id in sorted(self.stalled()):
            pool_id = self._engines[worker_id].pool_id
            found[pool_id] = (*found.get(pool_id, ()), worker_id)
        return found

    def findings(self) -> list[str]:
        """One line for each stalled worker: what is wrong, and what to do."""
        return [stall_line(worker_id, seconds) for worker_id, seconds in sorted(self.stalled().items())]

    # ------------------------------------------------------------ looks

    async def look(self) -> None:
        """Judge each engine once, probe the doubtful ones, and move requests away from stalled ones."""
        now = self._clock()
        late_s = 0.0 if self._looked_at is None else now - self._looked_at - EVERY_S
        self._looked_at = now
        if late_s > LATE_S:
            for engine in self._engines.values():
                engine.progress.skip(late_s, now)
        if self._engines and now - self._read_at >= RECORDS_S:
            self._read_at = now
            await self._read_records()
        for worker_id, engine in list(self._engines.items()):
            self._judge(worker_id, engine, now)

    def _judge(self, worker_id: str, engine: _Engine, now: float) -> None:
        progress = engine.progress
        progress.judge(now)
        record = self._records.get(worker_id)
        if engine.probe is not None and progress.state is State.ALIVE:
            engine.probe.cancel()
            engine.probe = None
        if record is not None and progress.wants_probe(now):
            self._probe(engine, record, now)
        self._report(worker_id, engine, now)
        if progress.is_stalled:
            self._move(worker_id, engine, now)
        if self._records and record is None and not engine.attempts:
            self._forget(worker_id)

    def _report(self, worker_id: str, engine: _Engine, now: float) -> None:
        is_stalled = engine.progress.is_stalled
        if is_stalled and not engine.reported:
            engine.reported, engine.stalled_at = True, now
            self._stalled[worker_id] = engine
            self.counters.stalls += 1
            quiet_s = engine.progress.quiet_s(now)
            _log.warning(
                "worker %s is stalled: no progress for %.1f s on %d requests, and none on a probe; it gets no new requests, "
                "and is probed until it computes again",
                worker_id,
                quiet_s,
                len(engine.attempts),
            )
        elif engine.reported and not is_stalled:
            engine.reported = False
            del self._stalled[worker_id]
            self.counters.returns += 1
            _log.info(
                "worker %s makes progress again after %.1f s; it gets requests again",
                worker_id,
                now - engine.stalled_at,
            )

    def _move(self, worker_id: str, engine: _Engine, now: float) -> None:
        alive = frozenset(
            id
            for id, record in self._records.items()
            if record.routable and record.endpoint.pool_id == engine.pool_id and not self._is_stalled(id)
        )
        for watched in list(engine.attempts.values()):
            if engine.progress.is_lost(now):
                watched.give_up(lost=True)
            elif alive and watched.sent.may_move(alive, watched.began) and watched.give_up():
                self.counters.moved += not watched.began

    def _is_stalled(self, worker_id: str) -> bool:
        engine = self._engines.get(worker_id)
        return engine is not None and engine.progress.is_stalled

    # ------------------------------------------------------------ probes, records

    def _probe(self, engine: _Engine, record: FleetRecord, now: float) -> None:
        if engine.probe is not None:
            engine.probe.cancel()
        self.counters.probes += 1
        engine.progress.send_probe(now)

        async def probe() -> None:
            outcome = await self._send_probe(record)
            engine.progress.end_probe(outcome, self._clock())

        engine.probe = asyncio.create_task(probe(), name=f"kvatlas probe of {record.endpoint.id}")

    async def _read_records(self) -> None:
        try:
            self._records = await self._read()
        except STORE_FAILURES as error:
            _log.debug("could not read the fleet for progress (%s); continuing with answers only", reason(error))
            return
        now = self._clock()
        for worker_id, engine in self._engines.items():
            record = self._records.get(worker_id)
            seen = None if record is None else _evidence_of(record)
            if record is not None and engine.seen not in (None, seen):
                engine.progress.observe(now - _age_s(record), now)
            engine.seen = seen

    def _engine(self, sent: SentAttempt) -> _Engine:
        engine = self._engines.get(sent.worker_id)
        if engine is None:
            engine = self._engines[sent.worker_id] = _Engine(sent.pool_id)
            engine.series = export_metrics("stalled", engine, {"worker": sent.worker_id})
        return engine

    def _forget(self, worker_id: str) -> None:
        """Drop a worker that has left the fleet. Also called when the router stops."""
        engine = self._engines.pop(worker_id)
        self._stalled.pop(worker_id, None)
        if engine.series is not None:
            engine.series.close()
        if engine.probe is not None:
            engine.probe.cancel()

    def _times_of(self, pool_id: str) -> ExpectedTimes:
        if (times := self._times.get(pool_id)) is None:
            times = self._times[pool_id] = ExpectedTimes()
        return times

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(EVERY_S)
            await self.look()


def stall_line(worker_id: str, seconds: float) -> str:
    return (
        f"worker {worker_id} is stalled: its engine has had work but made no progress for {seconds:.0f} s, whatever its "
        "/health says; it gets no requests. Check its log and its GPU (nvidia-smi, dmesg), and restart it"
    )


def _evidence_of(record: FleetRecord) -> tuple[int, ...]:
    """Values that change only while the engine computes. The numbers of running and waiting requests don't qualify, since the
    engine's HTTP server may count them."""
    load = record.load
    if load is None:
        return (record.applied_us,)
    computed = load.computed or load.forward_pass.active_kv_blocks
    return (record.applied_us, computed)


def _age_s(record: FleetRecord) -> float:
    """The age of the record's load sample, assuming synchronized clocks; 0 if unknown."""
    age_s = (time.time_ns() // 1_000 - record.heard_us + (record.load_age_us or 0)) / 1e6
    return age_s if 0.0 <= age_s <= MOST_AGE_S else 0.0
