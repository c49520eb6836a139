"""Decides which workers the index may be wrong about, and when to request a snapshot (pure; times are in seconds).

A snapshot is requested only if the worker's partition has been read to the end and its record is making no progress; otherwise
the missing messages may simply still be on their way. The exception is a bad record whose publisher reports no higher
incarnation, because no message still in flight can help there. Requests back off.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvatlas.index.protocol import WorkerRecord

PATIENCE_S = 2.0
LONGEST_PATIENCE_S = 16.0
OOM_PATIENCE_S = 5.0
FORGET_INCARNATION_S = 60.0
OTHERS_ONLY_S = 5.0
"""An incarnation is forgotten if, for this long, only other incarnations of its worker were heard from. This detects a
publisher that lost its state while its clock was set back: it reports a lower incarnation than the record does."""


class Doubt(StrEnum):
    """Why the index may be wrong about a worker."""

    UNKNOWN = "unknown"
    """The worker reports acknowledged messages, but the index has no record of the worker (the store was wiped)."""
    BEHIND = "behind"
    """The worker reports a higher incarnation or seq than its record has."""
    BAD = "bad"
    """Only a higher incarnation helps: a check failed, the stream was replaced, or the worker was retired or left without
    room."""
    GAP = "gap"
    """A message arrived with a higher seq than the next expected one."""
    FOREIGN = "foreign"
    """No publisher reports the incarnation in the worker's record."""

    @property
    def text(self) -> str:
        """A short human-readable text."""
        return _TEXTS[self]


_TEXTS = {
    Doubt.UNKNOWN: "unknown to the index",
    Doubt.BEHIND: "missing last messages",
    Doubt.BAD: "unusable incarnation",
    Doubt.GAP: "missing message",
    Doubt.FOREIGN: "incarnation of no publisher",
}


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Request a snapshot of this worker, with an incarnation above the highest known one."""

    worker_id: str
    above: int
    doubt: Doubt


@dataclass(slots=True)
class _OpenDoubt:
    """One worker in doubt: when it last made progress, what (incarnation, seq) it had reached, and how long to wait."""

    doubt: Doubt
    known: tuple[int, int]
    since_s: float
    patience_s: float


class DoubtJudge:
    """Compares the heartbeats of the owned workers with their records."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[int, tuple[int, float]]] = {}
        self._open: dict[str, _OpenDoubt] = {}

    def hear(self, worker_id: str, incarnation: int, acked_seq: int, now_s: float) -> None:
        """Record a heartbeat. A worker may have two publishers, so each incarnation is recorded separately."""
        self._heard.setdefault(worker_id, {})[incarnation] = (acked_seq, now_s)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the workers that are retired or whose partitions now belong to another replica."""
        for worker_id in [w for w in self._heard if is_gone(w)]:
            self._drop(worker_id)

    @property
    def doubts(self) -> Mapping[str, Doubt]:
        """The workers that are currently in doubt."""
        return {worker_id: one.doubt for worker_id, one in self._open.items()}

    def doubt_of(self, worker_id: str) -> Doubt | None:
        """The reason why this worker is currently in doubt; None if it is not."""
        one = self._open.get(worker_id)
        return None if one is None else one.doubt

    def judge(
        self, records: Mapping[str, WorkerRecord], at_end: Callable[[str], bool], now_s: float
    ) -> list[SnapshotRequest]:
        """The snapshots to request now. `at_end(worker)`: True if the worker's partition has been read to its end."""
        requests = []
        for worker_id in list(self._heard):
            incarnations = self._recent(worker_id, now_s)
            if not incarnations:
                self._drop(worker_id)
                continue
            record = records.get(worker_id)
            doubt = doubt_of(record, incarnations)
            if doubt is None:
                self._open.pop(worker_id, None)
                continue
            # the seq of a bad worker grows while its engine is busy, so only a higher incarnation is progress
            hopeless = doubt is Doubt.BAD and record is not None and max(incarnations) <= record.incarnation
            known = (record.incarnation, -1 if hopeless else record.seq) if record is not None else (-1, -1)
            one = self._open.get(worker_id)
            if one is None:
                patience_s = OOM_PATIENCE_S if record is not None and record.oom else PATIENCE_S
                self._open[worker_id] = _OpenDoubt(doubt, known, now_s, patience_s)
                continue
            one.doubt = doubt
            if one.known != known or not (hopeless or at_end(worker_id)):
                one.known, one.since_s = known, now_s
            elif now_s - one.since_s >= one.patience_s:
                requests.append(SnapshotRequest(worker_id, _doubted_incarnation(record, incarnations), doubt))
                one.since_s = now_s
                one.patience_s = min(2 * one.patience_s, LONGEST_PATIENCE_S)
        return requests

    def _drop(self, worker_id: str) -> None:
        del self._heard[worker_id]
        self._open.pop(worker_id, None)

    def _recent(self, worker_id: str, now_s: float) -> dict[int, int]:
        heard = self._heard[worker_id]
        last_s = max((at_s for _, at_s in heard.values()), default=now_s)
        oldest_s = max(now_s - FORGET_INCARNATION_S, last_s - OTHERS_ONLY_S)
        for incarnation in [i for i, (_, at_s) in heard.items() if at_s < oldest_s]:
            del heard[incarnation]
        return {incarnation: acked_seq for incarnation, (acked_seq, _) in heard.items()}


def doubt_of(record: WorkerRecord | None, heard: Mapping[int, int]) -> Doubt | None:
    """Why the index may be wrong about a worker; None if it is not in doubt. `heard`: incarnation -> acked seq from its
    heartbeats."""
    highest = max(heard.items())
    published = highest[1] >= 0  # before the first acknowledged message, nothing can be missing
    if record is None:
        return Doubt.UNKNOWN if published else None
    known = (record.incarnation, record.seq)
    if record.bad or record.closed:
        return Doubt.BAD
    if record.want > known:
        return Doubt.GAP
    if published and highest > known:
        return Doubt.BEHIND
    if record.incarnation >= 0 and record.incarnation not in heard:
        return Doubt.FOREIGN
    return None


def _doubted_incarnation(record: WorkerRecord | None, heard: Mapping[int, int]) -> int:
    """The highest known incarnation. An incarnation without an acknowledged message does not count, because it is still to come
    (its publisher may be waiting for a grant). The publisher therefore ignores the request, and sends that snapshot anyway."""
    met = [incarnation for incarnation, acked_seq in heard.items() if acked_seq >= 0]
    if record is not None:
        met += [record.incarnation, record.want[0]]
    return max(0, *met) if met else 0
