"""Decides which closed workers' records to delete (pure; times are seconds of the caller's clock).

A closed record makes the index refuse the rest of its incarnation in the stream. Once the stream holds nothing more of that
incarnation, the record is useless, but every pod that ever ran leaves one behind.
"""

from collections.abc import Iterable

from kvatlas.index.protocol import WorkerRecord


class RecordExpiry:
    """A record is due for deletion once it has been closed, without blocks and unchanged, for `after_s`, as far as this replica
    knows."""

    def __init__(self, after_s: float) -> None:
        """`after_s`: longer than the stream keeps a message."""
        self._after_s = after_s
        self._closed: dict[str, tuple[int, float]] = {}

    def update(self, records: Iterable[WorkerRecord], now_s: float) -> None:
        """Pass all current records of owned workers."""
        closed: dict[str, tuple[int, float]] = {}
        for record in records:
            if record.closed and not record.answering and not record.loading:
                incarnation, since_s = self._closed.get(record.worker_id, (-1, now_s))
                same = incarnation == record.incarnation
                closed[record.worker_id] = (record.incarnation, since_s if same else now_s)
        self._closed = closed

    def due(self, now_s: float) -> list[tuple[str, int]]:
        """(worker, incarnation) of the records to delete. A record is listed again until an update no longer contains it."""
        after_s = self._after_s
        return [(worker_id, inc) for worker_id, (inc, since_s) in self._closed.items() if now_s - since_s > after_s]
