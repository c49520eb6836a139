"""Finds the workers of a pool that fail while the others don't. Pure: takes answers and returns the workers to avoid.

A worker is ejected if at least LEAST_BAD of its recent answers failed (answers fade with a half-life of HALF_LIFE_S), the
failures are at least RATE of its answers, and that rate is at least WORSE times that of the rest of the pool: requests that
fail everywhere prove nothing about a worker. An ejection lasts EJECT_S, and each further one twice as long, until nothing has
counted against the worker for ten minutes. After an ejection, one router of the pool may send it one request (half open). If
its answer completes, or lasts for TRIAL_S, the worker is readmitted; otherwise it is ejected again. A good beginning is not
enough, since an engine that dies mid-answer begins every answer normally. Never more than SHARE of the candidates are avoided
because of failures.

Refusals (a 400) are mostly the request's own fault, and don't count as failures. They are counted separately: a refusal is
doubtful if its worker is ejected, or refuses so much more often than the others that it would be ejected for as many failures.
"""

from collections.abc import Callable, Collection, Mapping

from kvatlas.dataclass import dataclass
from kvatlas.ejection.store import CLAIM_S, HALF_LIFE_S, EjectionChange, EjectionRecord, Verdict

LEAST_BAD = 2.5
"""Three failures that have faded a little."""
RATE = 0.25
WORSE = 2.0
SHARE = 0.5
EJECT_S = 2.0
MOST_EJECT_S = 60.0
TRIAL_S = 10.0
UNREACHABLE_S = 2.0
"""How long a worker that did not answer is avoided. By then, its fleet record shows that it is down."""
MOST_REST_S = 30.0
"""A longer Retry-After from an engine is reduced to this, since the worker's record will show if it is down for
long."""


@dataclass(slots=True)
class _Counts:
    """Good and bad answers, fading; `at`: the time for which they are valid."""

    at: float
    good: float = 0.0
    bad: float = 0.0

    def fade(self, now: float) -> None:
        factor = 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        self.good, self.bad, self.at = self.good * factor, self.bad * factor, now


@dataclass(slots=True)
class _Worker:
    """`own`: this router's answers, not shared yet; `shared`: those of all routers, as last read. `refusals`: this router's
    answers, with refusals counted as bad. `ejected_until`: None if not ejected, in the past if half open. `may_probe`: until
    this time, only this router may try the worker again. `began_at`: when the answer to that attempt began."""

    own: _Counts
    shared: _Counts
    refusals: _Counts
    ejected_until: float | None = None
    times: int = 0
    may_probe: float = 0.0
    probing: bool = False
    began_at: float | None = None
    verdict: Verdict = Verdict.COUNT
    unreachable_until: float = 0.0
    resting_until: float = 0.0

    def rate(self, now: float) -> tuple[float, float]:
        """(bad, all) answers; older ones count less."""
        self.own.fade(now)
        self.shared.fade(now)
        bad = self.own.bad + self.shared.bad
        return bad, bad + self.own.good + self.shared.good

    def refusal_rate(self, now: float) -> tuple[float, float]:
        """(refused, all) requests; older ones count less."""
        self.refusals.fade(now)
        return self.refusals.bad, self.refusals.bad + self.refusals.good


@dataclass(frozen=True, slots=True)
class Avoided:
    """Candidates that should get no request now. `resting`: their engines asked for a pause and get no request before it ends.
    `failing`: they are used only if no other worker is left. `retry_after_s`: seconds until the first of `resting` may get
    requests again."""

    resting: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    retry_after_s: float = 0.0


class PoolEjections:
    """One pool, as seen by one router. Times are in seconds, from any monotonic clock."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._suspects: set[str] = set()
        """Workers that are avoided, or recently were."""

    # ------------------------------------------------------------ answers

    def record_good(self, worker_id: str, now: float) -> None:
        """Record that the worker began a successful answer."""
        worker = self._worker(worker_id, now)
        for counts in (worker.own, worker.refusals):
            counts.fade(now)
            counts.good += 1
        worker.unreachable_until = 0.0
        if worker.probing:
            worker.began_at = now

    def record_complete(self, worker_id: str, now: float) -> bool:
        """Record that an answer of the worker is complete. True if that ends its ejection."""
        worker = self._worker(worker_id, now)
        worker.probing, worker.began_at = False, None
        if worker.ejected_until is None or worker.ejected_until > now:
            return False
        worker.ejected_until, worker.may_probe, worker.verdict = None, 0.0, Verdict.READMIT
        worker.own, worker.shared = _Counts(now, good=1.0), _Counts(now)
        return True

    def record_bad(self, worker_id: str, now: float, *, unreachable: bool = False) -> float:
        """Record a failed request. Returns the seconds for which this ejects the worker; 0 if it does not. `unreachable`: the
        worker did not answer."""
        worker = self._worker(worker_id, now)
        worker.own.fade(now)
        worker.own.bad += 1
        if unreachable:
            worker.unreachable_until = now + UNREACHABLE_S
            self._suspects.add(worker_id)
        half_open, worker.probing = worker.ejected_until is not None and worker.ejected_until <= now, False
        worker.began_at = None
        if half_open or (worker.ejected_until is None and self._is_outlier(worker, now, _Worker.rate)):
            self._suspects.add(worker_id)
            return self._eject(worker, now)
        return 0.0

    def record_refused(self, worker_id: str, now: float) -> bool:
        """Record that the worker refused a request, which alone proves nothing. True if the refusal is doubtful."""
        worker = self._worker(worker_id, now)
        worker.refusals.fade(now)
        worker.refusals.bad += 1
        worker.probing, worker.began_at = False, None
        return worker.ejected_until is not None or self._is_outlier(worker, now, _Worker.refusal_rate)

    def record_unknown(self, worker_id: str) -> None:
        """Record that a request ended without evidence about its worker."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.probing, worker.began_at = False, None

    def ended_trials(self, now: float) -> list[str]:
        """Half-open workers that have been answering their trial request for so long that it counts as complete."""
        return [
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.began_at is not None and now - worker.began_at >= TRIAL_S
        ]

    def rest(self, worker_id: str, seconds: float, now: float) -> None:
        """Avoid the worker for this long, as its engine asked."""
        self._worker(worker_id, now).resting_until = now + min(seconds, MOST_REST_S)
        self._suspects.add(worker_id)

    def record_sent(self, worker_id: str, now: float) -> None:
        """Record that a request is being sent to the worker. A half-open worker gets no second request until this one
        is answered."""
        worker = self._workers.get(worker_id)
        if worker is not None and worker.ejected_until is not None and worker.ejected_until <= now:
            worker.probing = True

    # ------------------------------------------------------------ use

    def has_suspects(self, now: float) -> bool:
        """True if there is any worker to avoid, whatever the candidates."""
        for worker_id in list(self._suspects):
            worker = self._workers.get(worker_id)
            if worker is None or (
                worker.ejected_until is None and max(worker.unreachable_until, worker.resting_until) <= now
            ):
                self._suspects.discard(worker_id)
        return bool(self._suspects)

    def avoid(self, candidates: Collection[str], now: float) -> Avoided:
        """The workers to avoid now. `candidates`: workers that may get requests; the list may be a second old."""
        resting: dict[str, float] = {}
        ejected: list[tuple[float, str]] = []
        failing: set[str] = set()
        for worker_id in self._suspects & self._workers.keys():
            worker = self._workers[worker_id]
            if worker.resting_until > now:
                resting[worker_id] = worker.resting_until - now
            elif worker.unreachable_until > now:
                failing.add(worker_id)
            elif worker.ejected_until is not None and not self._may_try(worker, now):
                if worker_id in candidates:
                    ejected.append((worker.ejected_until, worker_id))
                else:  # it does not count towards SHARE
                    failing.add(worker_id)
        ejected.sort(reverse=True)
        failing.update(worker_id for _, worker_id in ejected[: int(len(candidates) * SHARE)])
        return Avoided(frozenset(resting), frozenset(failing), min(resting.values(), default=0.0))

    def ejected(self, now: float) -> Mapping[str, float]:
        """Ejected workers, with the seconds left; 0 or less: half open."""
        return {
            worker_id: worker.ejected_until - now
            for worker_id, worker in list(self._workers.items())
            if worker.ejected_until is not None
        }

    def rate_of(self, worker_id: str, now: float) -> tuple[float, float]:
        """(bad, all) answers of a worker; older ones count less."""
        return self._worker(worker_id, now).rate(now)

    # ------------------------------------------------------------ sharing

    def take_changes(self, now: float, *, used: bool) -> list[EjectionChange]:
        """The changes to share now: the counts of each worker that has recently failed, and the verdicts. `used`: this
        router has requests for the pool, so it may ask to retry workers."""
        changes = []
        for worker_id, worker in self._workers.items():
            worker.own.fade(now)
            half_open = worker.ejected_until is not None and worker.ejected_until <= now
            if worker.verdict is Verdict.COUNT and half_open and used and worker.may_probe <= now:
                worker.verdict = Verdict.PROBE
            if worker.verdict is Verdict.COUNT and worker.own.bad < 0.01 and worker.shared.bad < 0.01:
                continue
            times = worker.times - (worker.verdict is Verdict.EJECT)
            seconds = _eject_s(times) if worker.verdict is Verdict.EJECT else 0.0
            own = worker.own
            changes.append(EjectionChange(worker_id, own.good, own.bad, worker.verdict, times, seconds))
            worker.shared.fade(now)
            worker.shared.good, worker.shared.bad = worker.shared.good + own.good, worker.shared.bad + own.bad
            worker.own, worker.verdict = _Counts(now), Verdict.COUNT
        return changes

    def put_back(self, changes: Collection[EjectionChange], now: float) -> None:
        """Take back changes that the store did not confirm, to share them again. If the store did apply them, some answers
        are counted twice, which does no harm."""
        for change in changes:
            worker = self._worker(change.worker_id, now)
            worker.own.good, worker.own.bad = worker.own.good + change.good, worker.own.bad + change.bad
            if worker.verdict is Verdict.COUNT and change.verdict in (Verdict.EJECT, Verdict.READMIT):
                worker.verdict = change.verdict
            elif change.verdict is Verdict.PROBE:  # no store to decide who may try: this router does
                worker.may_probe = now + CLAIM_S

    def update(self, records: Mapping[str, EjectionRecord], router_id: str, now: float) -> None:
        """Take the records of all routers, as just read."""
        for worker_id, record in records.items():
            worker = self._worker(worker_id, now)
            worker.shared = _Counts(now, record.good, record.bad)
            if worker.verdict is not Verdict.COUNT:
                continue  # this router has decided in the meantime
            worker.times = record.times
            worker.ejected_until = None if record.left_s is None else now + record.left_s
            if worker.ejected_until is not None:
                self._suspects.add(worker_id)
            worker.may_probe = now + CLAIM_S if record.prober == router_id else 0.0
        for worker_id in self._workers.keys() - records.keys():
            worker = self._workers[worker_id]
            if worker.verdict is Verdict.COUNT:  # the store forgot it
                worker.ejected_until, worker.times = None, 0
            worker.shared = _Counts(now)
        self._forget_idle(now)

    # ------------------------------------------------------------ pieces

    def _worker(self, worker_id: str, now: float) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(_Counts(now), _Counts(now), _Counts(now))
        return worker

    def _is_outlier(self, worker: _Worker, now: float, rate: Callable[[_Worker, float], tuple[float, float]]) -> bool:
        bad, total = rate(worker, now)
        if bad < LEAST_BAD or bad < RATE * total:
            return False
        others = [rate(other, now) for other in self._workers.values() if other is not worker]
        others_bad, others_total = sum(one[0] for one in others), sum(one[1] for one in others)
        return bad * others_total >= WORSE * others_bad * total

    def _eject(self, worker: _Worker, now: float) -> float:
        seconds = _eject_s(worker.times)
        worker.times += 1
        worker.ejected_until, worker.may_probe = now + seconds, 0.0
        worker.verdict = Verdict.EJECT
        return seconds

    def _may_try(self, worker: _Worker, now: float) -> bool:
        assert worker.ejected_until is not None
        return worker.ejected_until <= now < worker.may_probe and not worker.probing

    def _forget_idle(self, now: float) -> None:
        for worker_id, worker in list(self._workers.items()):
            idle = worker.ejected_until is None and not worker.probing and worker.verdict is Verdict.COUNT
            known = worker.rate(now)[1] + worker.refusal_rate(now)[1]
            if idle and max(worker.unreachable_until, worker.resting_until) <= now and known < 0.01:
                del self._workers[worker_id]


def _eject_s(times: int) -> float:
    """Duration of the next ejection in seconds, after `times` earlier ones."""
    return min(EJECT_S * 2.0 ** min(times, 16), MOST_EJECT_S)
