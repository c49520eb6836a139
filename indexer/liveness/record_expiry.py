"""Which closed workers' records may go (pure; times are seconds of the caller's clock).

A closed record refuses what is left of its incarnation in the stream. When the stream has nothing of it any more, it is
only a name; and names are as many as pods that ever lived.
"""

from collections.abc import Iterable

from kvatlas.index.protocol import WorkerRecord


class Forgetting:
    """A record goes when it was closed, held nothing and did not change for `after_s`, as far as this replica has seen."""

    def __init__(self, after_s: float) -> None:
        """`after_s`: longer than the stream keeps a message."""
        self._after_s = after_s
        self._closed: dict[str, tuple[int, float]] = {}

    def see(self, records: Iterable[WorkerRecord], now_s: float) -> None:
        """All records that this replica is to judge, as they are now."""
        seen: dict[str, tuple[int, float]] = {}
        for record in records:
            if record.closed and not record.answering and not record.loading:
                before = self._closed.get(record.worker_id)
                known = before is not None and before[0] == record.incarnation
                seen[record.worker_id] = before if known and before is not None else (record.incarnation, now_s)
        self._closed = seen

    def due(self, now_s: float) -> list[tuple[str, int]]:
        """(worker, incarnation) of the records that may go; named again until they are seen no more."""
        after_s = self._after_s
        return [(worker_id, inc) for worker_id, (inc, since_s) in self._closed.items() if now_s - since_s > after_s]
