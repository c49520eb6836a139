"""Grants to send large snapshots, which limit how many bytes are on their way to one replica (pure).

Without them, a new leader in NATS or a wiped store would trigger the snapshots of all publishers at the same time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvatlas.bus.control import GrantReply, GrantRequest
from kvatlas.index.protocol import WorkerRecord

LIMIT_BYTES = 32 * 1024 * 1024
GRANT_S = 10.0
BYTES_PER_S = 8 * 1024 * 1024
"""A low estimate of how fast snapshots are applied; it only determines when a publisher asks again."""
SHORTEST_RETRY_MS = 100
LONGEST_RETRY_MS = 5_000


@dataclass(frozen=True, slots=True)
class _Grant:
    incarnation: int
    snapshot_bytes: int
    until_s: float


class GrantBudget:
    """A grant ends when the index answers with its incarnation or a later one, or after GRANT_S; asking again does not prolong
    it. If others are waiting, a worker whose grant ran out must wait GRANT_S for its next grant, so that no worker blocks the
    others."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._grants: dict[str, _Grant] = {}
        self._lapsed: dict[str, float] = {}
        """For each worker whose grant ran out: the time until which others go first."""
        self._others_wait_until_s = 0.0

    @property
    def outstanding_bytes(self) -> int:
        return sum(grant.snapshot_bytes for grant in self._grants.values())

    def answer(self, request: GrantRequest, now_s: float) -> GrantReply:
        """Decide whether this worker may send its snapshot now. A snapshot larger than the limit may be sent if no other grant
        is open, and then counts as the whole limit. A repeated request replaces the worker's grant but does not prolong it."""
        for worker_id in [w for w, grant in self._grants.items() if grant.until_s <= now_s]:
            self._lapsed[worker_id] = self._grants.pop(worker_id).until_s + GRANT_S
        self._lapsed = {worker_id: until_s for worker_id, until_s in self._lapsed.items() if until_s > now_s}
        mine = self._grants.pop(request.worker_id, None)
        others = self.outstanding_bytes
        size = min(request.snapshot_bytes, self._limit_bytes)
        if others and others + size > self._limit_bytes:
            if mine is not None and mine.incarnation == request.incarnation:
                self._grants[request.worker_id] = mine
                return GrantReply(granted=True)
            self._others_wait_until_s = now_s + 2 * LONGEST_RETRY_MS / 1_000
            return _wait_for((others + size - self._limit_bytes) * 1_000 // BYTES_PER_S)
        if (until_s := self._lapsed.get(request.worker_id)) is not None and now_s < self._others_wait_until_s:
            return _wait_for(int((until_s - now_s) * 1_000))
        until_s = mine.until_s if mine is not None else now_s + GRANT_S
        self._grants[request.worker_id] = _Grant(request.incarnation, size, until_s)
        return GrantReply(granted=True)

    def release_answering(self, records: Iterable[WorkerRecord]) -> None:
        """End the grants of snapshots that, according to these records, the index now answers with."""
        if self._grants:
            for record in records:
                if record.answering and not record.loading:
                    self.release(record.worker_id, record.incarnation)

    def release(self, worker_id: str, incarnation: int) -> None:
        """End the grant of a snapshot that has been applied."""
        grant = self._grants.get(worker_id)
        if grant is not None and incarnation >= grant.incarnation:
            del self._grants[worker_id]
            self._lapsed.pop(worker_id, None)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the workers that are retired or whose partitions now belong to another replica."""
        for worker_id in [w for w in self._grants if is_gone(w)]:
            del self._grants[worker_id]


def _wait_for(wait_ms: int) -> GrantReply:
    return GrantReply(granted=False, retry_after_ms=max(SHORTEST_RETRY_MS, min(wait_ms, LONGEST_RETRY_MS)))
