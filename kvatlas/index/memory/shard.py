"""One shard of the memory index: the reference model of the store's functions.

Plain synchronous code. Each public method is one atomic call, like each function in the store (`redis/functions/*.lua`), and
has the same name and the same rules.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from time import monotonic
from typing import Any

from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.memory.block_table import BlockTable, split
from kvatlas.index.memory.mark_table import HolderMarks
from kvatlas.index.protocol import ApplyResult, ScrubResult, WorkerRecord


@dataclass(slots=True)
class Record:
    """The fence of one worker; -1 stands for no holder."""

    partition: int
    incarnation: int = 0
    seq: int = -1
    active: int = -1
    loading: int = -1
    bad: bool = False
    closed: bool = False
    oom: bool = False
    want: tuple[int, int] = (0, -1)
    chunks: int = 0

    @property
    def changing(self) -> int:
        """The holder that events change; during a snapshot, that is the loading one."""
        return self.loading if self.loading >= 0 else self.active


class MemoryShard:
    """The workers and positions of one shard; `table` holds its blocks."""

    def __init__(self, *, side_index: bool = True, clock: Callable[[], float] = monotonic) -> None:
        """`clock`: a clock in seconds, to measure how long blocks are held."""
        self.table = BlockTable(side_index=side_index, clock=clock)
        self.workers: dict[str, Record] = {}
        self.positions: dict[int, Position] = {}
        self.counts = ApplyCounts()
        """The totals of all calls since the shard was created."""
        self.full = False
        """True to behave like a store that is out of memory: a store event closes the worker."""

    # ------------------------------------------------------------ apply

    def apply(self, batches: Sequence[PartitionBatch]) -> ApplyResult:
        before = copy(self.counts)
        moved = [batch.partition for batch in batches if not self._advance(batch)]
        touched: dict[str, None] = {}
        for batch in batches:
            if batch.partition in moved:
                continue
            for raw in batch.messages:
                worker_id = raw[wire.WORKER_ID]
                record = self.workers.setdefault(worker_id, Record(batch.partition))
                touched[worker_id] = None
                self._fence(worker_id, record, raw)
        records = [self.record(worker_id) for worker_id in touched]
        return ApplyResult.of(records, self.counts - before, moved, no_room=self.full)

    def _advance(self, batch: PartitionBatch) -> bool:
        if batch.position is None:
            return True
        stored = self.positions.get(batch.partition)
        if stored is None or stored.creation_us != batch.position.creation_us:
            return False
        if batch.after_seq is not None and stored.seq < batch.after_seq:
            return False
        if stored.seq < batch.position.seq:
            self.positions[batch.partition] = batch.position
        return True

    def _fence(self, worker_id: str, record: Record, raw: wire.RawMessage) -> None:
        _, _, incarnation, seq, _, scopes, events = raw
        if incarnation != record.incarnation:
            if incarnation < record.incarnation:
                self.counts.stale += 1
                return
            if seq != 0 or not events or events[0][wire.CODE] != wire.BEGIN:
                record.want = max(record.want, (incarnation, seq))
                self.counts.gaps += 1
                return
            record.incarnation, record.bad, record.closed, record.oom = incarnation, False, False, False
        elif seq <= record.seq:
            self.counts.duplicates += 1
            return
        elif record.closed or seq != record.seq + 1:
            record.want = max(record.want, (incarnation, seq))
            if record.closed:
                self.counts.refused += 1
            else:
                self.counts.gaps += 1
            return
        record.seq = seq
        self.counts.applied += 1
        for event in events:
            if not self._act(worker_id, record, event, scopes):
                return

    def _act(self, worker_id: str, record: Record, event: list[Any], scopes: dict[bytes, list[Any]]) -> bool:
        """Carry out one event. Returns False if it closed the worker's incarnation."""
        code = event[wire.CODE]
        holder = record.changing
        if code == wire.BEGIN:
            if record.seq != 0:
                return self._close(record)
            self.table.retire(record.loading)
            record.loading, record.chunks = self.table.allocate(worker_id), 0
            if len(event) > wire.DROPPED:
                self.table.marks.marked[number_bytes(record.loading)] = HolderMarks(event[wire.DROPPED])
        elif code == wire.CLEARED:
            fresh = self.table.allocate(worker_id)
            if (marks := self.table.marks.marked.get(number_bytes(max(holder, 0)))) is not None:
                self.table.marks.marked[number_bytes(fresh)] = HolderMarks(marks.dropped)
            self.table.retire(holder)
            if record.loading >= 0:
                record.loading = fresh
            else:
                record.active = fresh
                self.table.activate(fresh)
        elif code == wire.CHECKPOINT:
            if holder < 0 or self.digest_words(holder) != event[wire.CHECKPOINT_DIGEST]:
                self.counts.failed_checks += 1
                record.bad = True
        elif code == wire.END:
            return self._end(worker_id, record, event)
        elif holder < 0 or (code == wire.CHUNK and record.loading < 0):
            return self._close(record)
        elif code in (wire.MARKED, wire.UNMARKED, wire.HEADS):
            return self._act_on_marks(record, event, scopes)
        elif code == wire.REMOVED:
            scope_id, tier, hashes = event[wire.SCOPE_ID], event[wire.TIER], event[wire.HASHES]
            self.table.remove(holder, scope_id, Tier(tier), hashes, self.counts)
        elif self.full:
            record.oom = True
            return self._close(record)
        else:
            record.chunks += code == wire.CHUNK
            _, scope_id, tier, hashes, parent, _, _ = event
            self.table.holders[holder].touch(scope_id, wire.sizes_of(scopes[scope_id]))
            self.table.store(holder, scope_id, Tier(tier), hashes, self.counts)
            self.table.link(scope_id, parent or b"", hashes)
        return True

    def _act_on_marks(self, record: Record, event: list[Any], scopes: dict[bytes, list[Any]]) -> bool:
        marks, number = self.table.marks, number_bytes(record.changing)
        if self.full and event[wire.CODE] != wire.UNMARKED:
            record.oom = True
            return self._close(record)
        if number not in marks.marked:  # residency alone describes this worker
            return self._close(record)
        scope_id, hashes = event[wire.SCOPE_ID], event[wire.MARK_HASHES]
        self.table.holders[record.changing].touch(scope_id, wire.sizes_of(scopes[scope_id]))
        if event[wire.CODE] == wire.MARKED:
            marks.mark(number, scope_id, split(hashes))
        elif event[wire.CODE] == wire.UNMARKED:
            marks.unmark(number, scope_id, split(hashes))
        else:
            marks.set_heads(number, scope_id, hashes, event[wire.HEAD_BITS])
        return True

    def digest_words(self, holder: int) -> list[int]:
        """The digest of everything that a holder has: `Digest.words`, followed by `MarkDigest.words` if it has marks."""
        marks = self.table.marks.marked.get(number_bytes(holder))
        return self.table.holders[holder].digest.words + (marks.digest.words if marks is not None else [])

    def _end(self, worker_id: str, record: Record, event: list[Any]) -> bool:
        if record.loading < 0:
            return self._close(record)
        if record.chunks != event[wire.CHUNKS] or self.digest_words(record.loading) != event[wire.END_DIGEST]:
            # the last incarnation's blocks keep answering until the next snapshot is complete
            self.counts.failed_checks += 1
            self.table.retire(record.loading)
            record.loading, record.bad, record.closed = -1, True, True
            return False
        self.table.retire(record.active)
        record.active, record.loading = record.loading, -1
        self.table.activate(record.active)
        return True

    def _close(self, record: Record) -> bool:
        self.table.retire(record.active)
        self.table.retire(record.loading)
        record.active = record.loading = -1
        record.bad = record.closed = True
        return False

    def retire(self, worker_id: str, incarnation: int) -> bool:
        record = self.workers.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return False
        if record.closed and record.active < 0 and record.loading < 0:
            return False
        self._close(record)
        return True

    def forget(self, worker_id: str, incarnation: int) -> bool:
        record = self.workers.get(worker_id)
        if record is None or record.incarnation != incarnation or not record.closed:
            return False
        if record.active >= 0 or record.loading >= 0:
            return False
        del self.workers[worker_id]
        return True

    # ------------------------------------------------------------ scrub

    def scrub(self, partitions: Collection[int] | None = None) -> ScrubResult:
        """See `ResidencyIndex.scrub`."""
        counted, strays = self.table.recount()
        answering = {
            worker_id: record
            for worker_id, record in self.workers.items()
            if record.active >= 0 and (partitions is None or record.partition in partitions)
        }
        damaged = []
        for worker_id, record in answering.items():
            count = counted[record.active]
            sound = self.table.active.get(record.active) == worker_id and self.table.is_sound(record.active, count)
            if not sound or count.digest != self.table.holders[record.active].digest:
                record.bad = True
                damaged.append(worker_id)
        return ScrubResult(len(answering), damaged, strays, 0, True)

    # ------------------------------------------------------------ positions

    def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        stored = self.positions.get(partition)
        if stored != expected:
            return stored
        self.positions[partition] = new
        if expected is not None:
            for record in self.workers.values():
                record.bad |= record.partition == partition
        return new

    def record(self, worker_id: str) -> WorkerRecord:
        record = self.workers[worker_id]
        return WorkerRecord(
            worker_id,
            record.incarnation,
            record.seq,
            record.partition,
            record.bad,
            record.closed,
            record.oom,
            want=record.want,
            answering=record.active >= 0,
            loading=record.loading >= 0,
        )
