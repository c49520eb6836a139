"""Grants to send large snapshots: how many bytes of them may be on their way to one replica (pure).

Without them a new leader in NATS, or a wiped store, would bring the snapshots of all publishers at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvatlas.bus.control import GrantReply, GrantRequest
from kvatlas.index.protocol import WorkerRecord

LIMIT_BYTES = 32 * 1024 * 1024
GRANT_S = 10.0
BYTES_PER_S = 8 * 1024 * 1024
"""A low estimate of how fast snapshots are applied; it only sets when a publisher asks again."""
SHORTEST_RETRY_MS = 100
LONGEST_RETRY_MS = 5_000


@dataclass(frozen=True, slots=True)
class _Grant:
    incarnation: int
    snapshot_bytes: int
    until_s: float


class GrantBudget:
    """A grant ends when the index answers with its incarnation, or after GRANT_S."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._grants: dict[str, _Grant] = {}

    @property
    def outstanding_bytes(self) -> int:
        return sum(grant.snapshot_bytes for grant in self._grants.values())

    def answer(self, request: GrantRequest, now_s: float) -> GrantReply:
        """May this worker send its snapshot now? One larger than the limit may if no other grant is open. A worker that asks
        again replaces its grant."""
        for worker_id in [w for w, grant in self._grants.items() if grant.until_s <= now_s]:
            del self._grants[worker_id]
        mine = self._grants.pop(request.worker_id, None)
        others = self.outstanding_bytes
        if others and others + request.snapshot_bytes > self._limit_bytes:
            if mine is not None and mine.incarnation == request.incarnation:
                self._grants[request.worker_id] = mine
                return GrantReply(granted=True)
            wait_ms = (others + request.snapshot_bytes - self._limit_bytes) * 1_000 // BYTES_PER_S
            return GrantReply(granted=False, retry_after_ms=max(SHORTEST_RETRY_MS, min(wait_ms, LONGEST_RETRY_MS)))
        self._grants[request.worker_id] = _Grant(request.incarnation, request.snapshot_bytes, now_s + GRANT_S)
        return GrantReply(granted=True)

    def release_answering(self, records: Iterable[WorkerRecord]) -> None:
        """End the grants of the snapshots that these records answer with."""
        if self._grants:
            for record in records:
                if record.answering and not record.loading:
                    self.release(record.worker_id, record.incarnation)

    def release(self, worker_id: str, incarnation: int) -> None:
        """The worker's snapshot of this incarnation is applied."""
        grant = self._grants.get(worker_id)
        if grant is not None and incarnation >= grant.incarnation:
            del self._grants[worker_id]

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """These workers' partitions are another replica's now, or they are retired."""
        for worker_id in [w for w in self._grants if is_gone(w)]:
            del self._grants[worker_id]
