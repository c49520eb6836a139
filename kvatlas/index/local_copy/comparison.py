"""Compares the workers in a local copy with those in the store, to catch changes without a message and messages that the copy
missed.

The store may close a worker without a message (because the worker is gone, or the store is out of memory); the copy then does
the same. A copy that missed a message, or applied one differently, differs from the store for longer than the stream needs to
catch up; it is then rebuilt. A copy may be ahead of the store if the indexer has not yet applied what it has read.
"""

from collections.abc import Mapping
from enum import Enum, auto

from kvatlas.index.memory.shard import MemoryShard, Record
from kvatlas.index.redis.records import StoredRecord, unpack_incarnation

ABSENT_S = 10.0
"""A worker that the store has not known for this long is dropped from the copy too."""

Moment = tuple[int, int]
"""(incarnation, seq)."""


class Difference(Enum):
    """How a worker in the copy differs from the same worker in the store."""

    NONE = auto()
    BEHIND = auto()
    """The store has applied messages that have not arrived here yet."""
    CLOSED_THERE = auto()
    """The store no longer holds anything of this incarnation."""
    ABSENT_THERE = auto()
    WRONG = auto()
    """The two differ at the same message, or permanently."""


def moment_of(record: Record | None) -> Moment:
    """The moment of a record; if there is no record, a moment below all others."""
    return (record.incarnation, record.seq) if record is not None else (0, -1)


def stored_moment(stored: StoredRecord) -> Moment:
    return unpack_incarnation(stored.incarnation), stored.seq


def compare(mine: Record | None, stored: StoredRecord | None) -> Difference:
    """Compare two records; `stored` must have been read before `mine`."""
    answers_here = mine is not None and (mine.active >= 0 or mine.loading >= 0)
    if stored is None:
        return Difference.ABSENT_THERE if mine is not None else Difference.NONE
    holds_there = bool(stored.active or stored.loading)
    if mine is None:
        return Difference.BEHIND if holds_there else Difference.NONE
    here, there = moment_of(mine), stored_moment(stored)
    if here < there:
        return Difference.BEHIND
    if here[0] > there[0]:
        return Difference.NONE
    if stored.closed and not mine.closed:  # the store will apply nothing more of this incarnation
        return Difference.WRONG if holds_there else Difference.CLOSED_THERE
    if here > there:
        return Difference.NONE
    if stored.closed and answers_here and not holds_there:
        return Difference.CLOSED_THERE
    states = (mine.active >= 0, mine.loading >= 0, mine.closed)
    if states != (bool(stored.active), bool(stored.loading), bool(stored.closed)) or (mine.bad and not stored.bad):
        return Difference.WRONG
    return Difference.NONE


class ShardComparison:
    """The comparisons of one shard over time."""

    def __init__(self, shard: MemoryShard) -> None:
        self.shard = shard
        self._expected: dict[str, tuple[Moment, float]] = {}
        """Workers that were behind: what the store had applied, and when we read that."""
        self._absent_since_s: dict[str, float] = {}

    def follow(self, stored: Mapping[str, StoredRecord], read_s: float, current_s: float) -> str | None:
        """Close and drop in the copy the workers that the store has closed and dropped. Returns why the copy is wrong, or None.

        `read_s`: when the records had been read; `current_s`: everything that was in the stream at this time has been applied
        here.
        """
        workers, unsettled = self.shard.workers, {}
        for worker_id, (moment, since_s) in self._expected.items():
            if current_s <= since_s:
                unsettled[worker_id] = moment, since_s
            elif moment_of(workers.get(worker_id)) < moment and worker_id in stored:
                return f"worker {worker_id}: message {moment[1]} of incarnation {moment[0]} did not arrive"
        self._expected = unsettled
        for worker_id in workers.keys() | stored.keys():
            mine, theirs = workers.get(worker_id), stored.get(worker_id)
            difference = compare(mine, theirs)
            if difference is Difference.WRONG:
                return f"worker {worker_id}: its state differs from the store's"
            if difference is Difference.BEHIND and theirs is not None:
                self._expected.setdefault(worker_id, (stored_moment(theirs), read_s))
            elif difference is Difference.CLOSED_THERE and mine is not None:
                self.shard.retire(worker_id, mine.incarnation)
            if difference is not Difference.ABSENT_THERE or mine is None:
                self._absent_since_s.pop(worker_id, None)
            elif self._absent_since_s.setdefault(worker_id, read_s) + ABSENT_S <= read_s:
                self.shard.retire(worker_id, mine.incarnation)
                self.shard.forget(worker_id, mine.incarnation)
        return None
