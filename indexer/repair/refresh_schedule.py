"""Decides which worker to ask for a fresh snapshot although nothing seems wrong (pure; times are seconds).

Damage that no message caused (blocks changed by hand, writes that the store lost) changes no digest. A fresh snapshot replaces
all of a worker's entries, and costs the store no more than counting them would.
"""

from collections.abc import Callable, Sequence
from math import inf
from random import Random

from kvatlas.index.protocol import WorkerRecord

BLOCKS_PER_S = 1_000
"""Bound of all refreshes of a replica: with the sweep of the old entries, about 2 % of a store's processor."""


class RefreshSchedule:
    """A worker is due `period_s` after its snapshot, or somewhat earlier, so that workers take turns."""

    def __init__(self, period_s: float, rng: Random | None = None) -> None:
        self._period_s = period_s
        self._rng = rng or Random()
        self._due: dict[str, tuple[int, float]] = {}
        """By worker: its incarnation, and when it is due."""
        self._pause_until_s = -inf

    def due(
        self, records: Sequence[WorkerRecord], is_ready: Callable[[WorkerRecord], bool], now_s: float
    ) -> WorkerRecord | None:
        """The ready worker that has been due longest. `records`: those of all owned workers."""
        due: dict[str, tuple[int, float]] = {}
        for record in records:
            incarnation, at_s = self._due.get(record.worker_id, (None, 0.0))
            if incarnation != record.incarnation:
                at_s = now_s + self._period_s * self._rng.uniform(0.5, 1.0)
            due[record.worker_id] = (record.incarnation, at_s)
        self._due = due
        if now_s < self._pause_until_s:
            return None
        ready = [record for record in records if due[record.worker_id][1] <= now_s and is_ready(record)]
        return min(ready, key=lambda record: due[record.worker_id][1], default=None)

    def note_request(self, record: WorkerRecord, blocks: int, now_s: float) -> None:
        """Note that a snapshot of this worker, which has so many blocks, was requested. If none comes, it is requested again
        a period later."""
        self._due[record.worker_id] = (record.incarnation, now_s + self._period_s)
        self._pause_until_s = now_s + blocks / BLOCKS_PER_S
