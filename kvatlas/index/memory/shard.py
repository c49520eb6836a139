"""One shard of the memory index: the reference model of what the store's functions do.

Plain synchronous code. Each public method is one atomic call, as each function is in the store
(`functions/*.lua`); names and rules are theirs.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvatlas.blocks.digest import Digest, FlagDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import HOLDER_ENTRY_BYTES, ShardRuns
from kvatlas.blocks.tiers import TIER_MASK, Tier, tiers_of
from kvatlas.bus import wire
from kvatlas.index.gallop import STRIDE, gallop, walk
from kvatlas.index.holder_entries import (
    MAX_HOLDER,
    find_entry,
    flags_in,
    number_bytes,
    with_entry,
    without_entry,
    without_holder,
)
from kvatlas.index.protocol import Applied, PartitionBatch, Position, Scrubbed, WorkerRecord


@dataclass(slots=True)
class Record:
    """The fence of one worker; -1 for no holder."""

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
    def telling(self) -> int:
        """The holder that events change now."""
        return self.loading if self.loading >= 0 else self.active


@dataclass(slots=True)
class Counts:
    """What calls did, since the shard was made."""

    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    refused: int = 0
    failed_checks: int = 0
    stored: int = 0
    removed: int = 0
    bytes_written: int = 0


@dataclass(slots=True)
class Holder:
    """One incarnation's blocks. `touched` maps each scope used to (block size, block bytes); `flags` are told besides
    tiers."""

    worker_id: str
    digest: Digest = field(default_factory=Digest)
    touched: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    flags: FlagDigest = field(default_factory=FlagDigest)


class MemoryShard:
    def __init__(self) -> None:
        self.blocks: dict[bytes, dict[bytes, bytes]] = {}
        self.parents: dict[bytes, dict[bytes, bytes]] = {}
        self.children: dict[bytes, dict[bytes, list[bytes]]] = {}
        self.workers: dict[str, Record] = {}
        self.holders: dict[int, Holder] = {}
        self.active: dict[int, str] = {}
        self.retired: dict[int, None] = {}
        self.positions: dict[int, Position] = {}
        self.counts = Counts()
        self.full = False
        """As a store that has no memory left: what it should store closes the worker."""
        self._free: list[int] = []
        self._next = 0

    # ------------------------------------------------------------ apply

    def apply(self, batches: Sequence[PartitionBatch]) -> Applied:
        before = Counts(**{name: getattr(self.counts, name) for name in Counts.__slots__})
        moved = [batch.partition for batch in batches if not self._advance(batch)]
        touched: dict[str, None] = {}
        for batch in batches:
            if batch.partition in moved:
                continue
            for raw in batch.messages:
                worker_id = raw[wire.WORKER_ID]
                record = self.workers.setdefault(worker_id, Record(batch.partition))
                touched[worker_id] = None
                self._fold(worker_id, record, raw)
        after = self.counts
        return Applied(
            [self.record(worker_id) for worker_id in touched],
            after.applied - before.applied,
            after.duplicates - before.duplicates,
            after.stale - before.stale,
            after.gaps - before.gaps,
            after.refused - before.refused,
            after.failed_checks - before.failed_checks,
            tuple(moved),
            no_room=self.full,
        )

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

    def _fold(self, worker_id: str, record: Record, raw: wire.RawMessage) -> None:
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
        """What one event does; False where it closed the worker's incarnation."""
        code = event[wire.CODE]
        holder = record.telling
        if code == wire.BEGIN:
            if record.seq != 0:
                return self._close(record)
            self._retire_holder(record.loading)
            record.loading, record.chunks = self._allocate(worker_id), 0
        elif code == wire.CLEARED:
            fresh = self._allocate(worker_id)
            self._retire_holder(holder)
            if record.loading >= 0:
                record.loading = fresh
            else:
                record.active = fresh
                self.active[fresh] = worker_id
        elif code == wire.CHECKPOINT:
            if holder < 0 or self.holders[holder].digest.words != event[wire.CHECKPOINT_DIGEST]:
                self.counts.failed_checks += 1
                record.bad = True
        elif code == wire.END:
            return self._end(worker_id, record, event)
        elif holder < 0 or (code == wire.CHUNK and record.loading < 0):
            return self._close(record)
        elif code == wire.REMOVED:
            self._remove(holder, event[wire.SCOPE_ID], Tier(event[wire.TIER]), event[wire.HASHES])
        elif self.full:
            record.oom = True
            return self._close(record)
        else:
            record.chunks += code == wire.CHUNK
            _, scope_id, tier, hashes, parent, _, flags = event
            use = scopes[scope_id]
            self.holders[holder].touched.setdefault(scope_id, (use[wire.BLOCK_SIZE], use[wire.BLOCK_BYTES]))
            self._store(holder, scope_id, Tier(tier), hashes, flags)
            self._link(scope_id, parent or b"", hashes)
        return True

    def _end(self, worker_id: str, record: Record, event: list[Any]) -> bool:
        if record.loading < 0:
            return self._close(record)
        if record.chunks != event[wire.CHUNKS] or self.holders[record.loading].digest.words != event[wire.END_DIGEST]:
            # what the last incarnation told goes on answering until the next one is whole
            self.counts.failed_checks += 1
            self._retire_holder(record.loading)
            record.loading, record.bad, record.closed = -1, True, True
            return False
        self._retire_holder(record.active)
        record.active, record.loading = record.loading, -1
        self.active[record.active] = worker_id
        return True

    # ------------------------------------------------------------ blocks

    def _store(self, holder: int, scope_id: bytes, tier: Tier, hashes: bytes, flags: int) -> None:
        number, blocks = number_bytes(holder), self.blocks.setdefault(scope_id, {})
        changed: list[bytes] = []
        for key in split(hashes):
            old = blocks.get(key, b"")
            new = with_entry(old, number, tier.flag, flags)
            if new != old:
                blocks[key] = new
                self.counts.bytes_written += len(key) + len(new)
                if not flags_in(old, number) & tier.flag:
                    changed.append(key)
                self.holders[holder].flags.add(scope_id, flags & ~flags_in(old, number), key)
        self.counts.stored += len(changed)
        self.holders[holder].digest.add(scope_id, tier, b"".join(changed))

    def _remove(self, holder: int, scope_id: bytes, tier: Tier, hashes: bytes) -> None:
        number, blocks = number_bytes(holder), self.blocks.get(scope_id, {})
        changed: list[bytes] = []
        for key in split(hashes):
            old = blocks.get(key, b"")
            new = without_entry(old, number, tier.flag)
            if new == old:
                continue
            changed.append(key)
            self.holders[holder].flags.add(scope_id, flags_in(old, number) & ~flags_in(new, number), key, -1)
            self._replace(scope_id, key, new)
            if new:
                self.counts.bytes_written += len(key) + len(new)
        self.counts.removed += len(changed)
        self.holders[holder].digest.add(scope_id, tier, b"".join(changed), -1)

    def _replace(self, scope_id: bytes, key: bytes, value: bytes) -> None:
        if value:
            self.blocks[scope_id][key] = value
            return
        del self.blocks[scope_id][key]
        parent = self.parents.get(scope_id, {}).pop(key, None)
        if parent is not None:
            siblings = self.children[scope_id][parent]
            siblings.remove(key)
            if not siblings:
                del self.children[scope_id][parent]

    def _link(self, scope_id: bytes, parent: bytes, hashes: bytes) -> None:
        parents, children = self.parents.setdefault(scope_id, {}), self.children.setdefault(scope_id, {})
        for key in split(hashes):
            if key not in parents:
                parents[key] = parent
                children.setdefault(parent, []).append(key)
            parent = key

    # ------------------------------------------------------------ holders

    def _allocate(self, worker_id: str) -> int:
        if self._next < MAX_HOLDER:
            self._next += 1
            holder = self._next
        else:
            holder = self._free.pop(0)  # first freed first
        self.holders[holder] = Holder(worker_id)
        return holder

    def _retire_holder(self, holder: int) -> None:
        if holder >= 0:
            self.active.pop(holder, None)
            self.retired[holder] = None

    def _close(self, record: Record) -> bool:
        self._retire_holder(record.active)
        self._retire_holder(record.loading)
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

    def sweep(self) -> int:
        """Takes every retired holder out of all blocks; how many are left (none)."""
        for holder in list(self.retired):
            number = number_bytes(holder)
            for scope_id in self.holders[holder].touched:
                for key, value in list(self.blocks.get(scope_id, {}).items()):
                    for tier in tiers_of(flags_in(value, number)):
                        self.holders[holder].digest.add(scope_id, tier, key, -1)
                    rest = without_holder(value, number)
                    if rest != value:
                        self._replace(scope_id, key, rest)
            del self.retired[holder], self.holders[holder]
            self._free.append(holder)
        return len(self.retired)

    def forget_empty_scopes(self) -> Collection[bytes]:
        """Keep nothing of scopes that the shard holds no block of; the others."""
        for scope_id in [scope_id for scope_id, blocks in self.blocks.items() if not blocks]:
            for kept in (self.blocks, self.parents, self.children):
                kept.pop(scope_id, None)
            for holder in self.holders.values():
                holder.touched.pop(scope_id, None)
        return self.blocks.keys()

    def scrub(self, partitions: Collection[int] | None = None) -> Scrubbed:
        """See `ResidencyIndex.scrub`."""
        counted = {holder: (Digest(), FlagDigest()) for holder in self.active}
        strange: set[int] = set()
        strays = 0
        for scope_id, blocks in self.blocks.items():
            for key, value in list(blocks.items()):
                for at in range(0, len(value), HOLDER_ENTRY_BYTES):
                    number, flags = value[at : at + 3], value[at + 3]
                    holder = int.from_bytes(number, "big")
                    if holder in counted:
                        self.holders[holder].touched.setdefault(scope_id, (0, 0))  # where a sweep must look
                        for tier in tiers_of(flags):
                            counted[holder][0].add(scope_id, tier, key)
                        counted[holder][1].add(scope_id, flags, key)
                        if not flags & TIER_MASK:
                            strange.add(holder)
                    elif holder not in self.holders:
                        strays += 1
                        self._replace(scope_id, key, without_holder(blocks[key], number))
        answering = {
            worker_id: record
            for worker_id, record in self.workers.items()
            if record.active >= 0 and (partitions is None or record.partition in partitions)
        }
        damaged = []
        for worker_id, record in answering.items():
            right = self.active.get(record.active) == worker_id and record.active not in strange
            mine = self.holders[record.active]
            tiers, told_flags = counted[record.active]
            if not right or tiers != mine.digest or told_flags.words != mine.flags.words:
                record.bad = True
                damaged.append(worker_id)
        return Scrubbed(len(answering), damaged, strays, 0, True)

    def sound(self, worker_id: str) -> bool:
        """See `Recounted`. The worker has an active holder."""
        holder, flags = self.workers[worker_id].active, FlagDigest()
        number = number_bytes(holder)
        for scope_id, blocks in self.blocks.items():
            for key, value in blocks.items():
                if find_entry(value, number)[1]:
                    if not flags_in(value, number) & TIER_MASK:
                        return False
                    flags.add(scope_id, flags_in(value, number), key)
        return self.active.get(holder) == worker_id and flags.words == self.holders[holder].flags.words

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

    # ------------------------------------------------------------ questions

    def overlap(self, scope_id: bytes, hashes: bytes, stride: int = STRIDE) -> ShardRuns:
        """Runs of equal holders; stride 0 walks every block."""
        blocks = self.blocks.get(scope_id)
        if not blocks:
            return ShardRuns((), (), {})
        values, lengths = gallop(blocks.get, hashes, stride) if stride else walk(blocks.get, hashes)
        return ShardRuns(values, lengths, self.active)

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

    def entries(self, scope_id: bytes, key: bytes) -> Iterator[tuple[int, int]]:
        """(holder, flags) of the active holders of one block."""
        value = self.blocks.get(scope_id, {}).get(key, b"")
        for at in range(0, len(value), HOLDER_ENTRY_BYTES):
            holder = int.from_bytes(value[at : at + 3], "big")
            if holder in self.active:
                yield holder, value[at + 3]


def split(packed: bytes) -> list[bytes]:
    """Packed hashes as single ones, each once, in order."""
    return list(dict.fromkeys(packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)))
