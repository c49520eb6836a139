"""Which workers the index is perhaps wrong about, and when to ask for a snapshot (pure; times are seconds).

Doubt is judged only while the worker's partition is read up to its end, and only of a worker whose record makes no
progress: before that, what is missing may just be on its way. Not so where nothing on its way can help: a bad record whose
publisher tells of no higher incarnation. Asking again backs off.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvatlas.index.protocol import WorkerRecord

PATIENCE_S = 2.0
LONGEST_PATIENCE_S = 16.0
OOM_PATIENCE_S = 5.0
FORGET_INCARNATION_S = 60.0
OTHERS_ONLY_S = 5.0
"""An incarnation is forgotten when for so long only others of its worker were heard. A publisher that lost its state under
a clock that went back tells a lower incarnation than the record's, and only so that is seen."""


class Doubt(StrEnum):
    """Why the index is perhaps wrong about a worker."""

    UNKNOWN = "unknown"
    """It tells of acknowledged messages, the index knows nothing of it (a wiped store)."""
    BEHIND = "behind"
    """It tells of a higher incarnation or seq than its record has."""
    BAD = "bad"
    """Only a higher incarnation helps: a failed check, another stream, retired, out of memory."""
    GAP = "gap"
    """A message above the next one was met."""
    FOREIGN = "foreign"
    """Its record is of an incarnation that nobody tells of."""


@dataclass(frozen=True, slots=True)
class SnapshotWish:
    """Ask this worker for a snapshot, naming the highest incarnation that was met."""

    worker_id: str
    above: int
    doubt: Doubt


@dataclass(slots=True)
class _Open:
    """One worker in doubt: since when without progress, at which (incarnation, seq), and how long to wait."""

    doubt: Doubt
    known: tuple[int, int]
    since_s: float
    patience_s: float


class DoubtJudge:
    """Hears heartbeats and judges records of the workers of the owned partitions."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[int, tuple[int, float]]] = {}
        self._open: dict[str, _Open] = {}

    def hear(self, worker_id: str, incarnation: int, acked_seq: int, now_s: float) -> None:
        """A heartbeat. Two publishers may tell of one worker: each incarnation is remembered on its own."""
        self._heard.setdefault(worker_id, {})[incarnation] = (acked_seq, now_s)

    def forget(self, workers: Iterable[str]) -> None:
        """Their partition is another's now, or they are retired."""
        for worker_id in workers:
            self._heard.pop(worker_id, None)
            self._open.pop(worker_id, None)

    @property
    def workers(self) -> list[str]:
        """Every worker heard of lately."""
        return list(self._heard)

    @property
    def open(self) -> Mapping[str, Doubt]:
        """The workers in doubt now."""
        return {worker_id: one.doubt for worker_id, one in self._open.items()}

    def judge(
        self, records: Mapping[str, WorkerRecord], at_end: Callable[[str], bool], now_s: float
    ) -> list[SnapshotWish]:
        """One tick: whom to ask for a snapshot now. `at_end`: is the worker's partition read up to its end?"""
        wishes = []
        for worker_id in list(self._heard):
            incarnations = self._recent(worker_id, now_s)
            if not incarnations:
                self.forget([worker_id])
                continue
            record = records.get(worker_id)
            doubt = doubt_of(record, incarnations)
            if doubt is None:
                self._open.pop(worker_id, None)
                continue
            # a bad one may go on as fast as its engine is busy: only a higher incarnation is progress
            hopeless = doubt is Doubt.BAD and record is not None and max(incarnations) <= record.incarnation
            known = (record.incarnation, -1 if hopeless else record.seq) if record is not None else (-1, -1)
            one = self._open.get(worker_id)
            if one is None:
                patience_s = OOM_PATIENCE_S if record is not None and record.oom else PATIENCE_S
                self._open[worker_id] = _Open(doubt, known, now_s, patience_s)
                continue
            one.doubt = doubt
            if one.known != known or not (hopeless or at_end(worker_id)):
                one.known, one.since_s = known, now_s
            elif now_s - one.since_s >= one.patience_s:
                wishes.append(SnapshotWish(worker_id, _doubted_incarnation(record, incarnations), doubt))
                one.since_s = now_s
                one.patience_s = min(2 * one.patience_s, LONGEST_PATIENCE_S)
        return wishes

    def _recent(self, worker_id: str, now_s: float) -> dict[int, int]:
        heard = self._heard[worker_id]
        last_s = max((at_s for _, at_s in heard.values()), default=now_s)
        oldest_s = max(now_s - FORGET_INCARNATION_S, last_s - OTHERS_ONLY_S)
        for incarnation in [i for i, (_, at_s) in heard.items() if at_s < oldest_s]:
            del heard[incarnation]
        return {incarnation: acked_seq for incarnation, (acked_seq, _) in heard.items()}


def doubt_of(record: WorkerRecord | None, heard: Mapping[int, int]) -> Doubt | None:
    """Is the index perhaps wrong? `heard`: incarnation -> acked seq of the worker's heartbeats."""
    highest = max(heard.items())
    told = highest[1] >= 0  # before the first acknowledged message there is nothing to miss
    if record is None:
        return Doubt.UNKNOWN if told else None
    known = (record.incarnation, record.seq)
    if record.bad or record.closed:
        return Doubt.BAD
    if record.want > known:
        return Doubt.GAP
    if told and highest > known:
        return Doubt.BEHIND
    if record.incarnation >= 0 and record.incarnation not in heard:
        return Doubt.FOREIGN
    return None


def _doubted_incarnation(record: WorkerRecord | None, heard: Mapping[int, int]) -> int:
    """The highest incarnation met. One of which nothing is acknowledged yet is still to be told (it may wait for a
    grant): it is not named, so that its publisher ignores the request and goes on with it."""
    met = [incarnation for incarnation, acked_seq in heard.items() if acked_seq >= 0]
    if record is not None:
        met += [record.incarnation, record.want[0]]
    return max(0, *met) if met else 0
