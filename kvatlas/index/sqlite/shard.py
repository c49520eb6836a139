"""One shard of a SqliteIndex: a shard of the memory index that describes its changes as rows."""

from itertools import islice
from typing import Any

import msgpack

from kvatlas.blocks.block_sizes import BlockSizes, in_order
from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import Position
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.memory.block_table import Holder
from kvatlas.index.memory.mark_table import HolderMarks
from kvatlas.index.memory.shard import MemoryShard, Record
from kvatlas.index.sqlite.changes import RowIds, TrackedDict, ValuesByScope
from kvatlas.index.sqlite.file import Changes, IndexFile

LOADING, ACTIVE, RETIRED = "l", "a", "r"


class SqliteShard(MemoryShard):
    """`changed_workers`: the workers whose records, or whose holders' digests, have changed."""

    def __init__(self, number: int, *, side_index: bool = True) -> None:
        super().__init__(side_index=side_index)
        self.number = number
        workers: TrackedDict[str, Record] = TrackedDict()
        self.workers = workers
        self.changed_workers = workers.changed
        table = self.table
        self._blocks, self._parents = table.blocks, table.parents = ValuesByScope(), ValuesByScope()
        self._marks, self._heads = table.marks.marks, table.marks.heads = ValuesByScope(), ValuesByScope()
        self._holders: TrackedDict[int, Holder] = TrackedDict()
        self._active: TrackedDict[int, str] = TrackedDict()
        self._retired: TrackedDict[int, None] = TrackedDict()
        self._positions: TrackedDict[int, Position] = TrackedDict()
        self._row_ids = {"blocks": RowIds(), "marks": RowIds(), "heads": RowIds()}
        self._pins = table.pins.tiers = TrackedDict()
        table.holders, table.active, table.retired = self._holders, self._active, self._retired
        self.positions = self._positions

    @property
    def changed(self) -> list[dict[Any, None]]:
        """The records of the changes since they were last emptied."""
        values = (self._blocks, self._parents, self._marks, self._heads)
        numbers = (self._holders, self._active, self._retired, self._positions, self._pins)
        return [*(one.changed for one in values), *(one.changed for one in numbers), self.changed_workers]

    @property
    def changed_values(self) -> list[dict[tuple[bytes, bytes], None]]:
        """Those records in `changed` that may have many entries."""
        return [one.changed for one in (self._blocks, self._parents, self._marks, self._heads)]

    # ------------------------------------------------------------ to the file

    def describe_values(self, changes: Changes, most: int | None = None) -> None:
        """Add the rows of changed values: the first `most` of each kind (None: all)."""
        linked = self._parents.changed
        for name, table, changed in (
            ("blocks", self._blocks, linked | self._blocks.changed if linked else self._blocks.changed),
            ("marks", self._marks, self._marks.changed),
            ("heads", self._heads, self._heads.changed),
        ):
            ids = self._row_ids[name]
            ids.gone.clear()
            for scope_id, key in islice(changed, most):
                value = table.get(scope_id, {}).get(key)
                if value is None:
                    if (gone := ids.of_gone(scope_id, key)) is not None:
                        changes.put(name, (self.number, gone), None)
                    continue
                parent = (self._parents.get(scope_id, {}).get(key),) if table is self._blocks else ()
                changes.put(name, (self.number, ids.of_value(scope_id, key)), (scope_id, key, value, *parent))

    def describe(self, changes: Changes) -> None:
        """Add the rows of everything that has changed."""
        self.describe_values(changes)
        for partition in self._positions.changed:
            position = self._positions.get(partition)
            row = None if position is None else (position.creation_us, position.seq)
            changes.put("positions", (self.number, partition), row)
        for place in self._pins.changed:
            tiers = self._pins.get(place)
            changes.put("pinned", (self.number, *place), None if tiers is None else (tiers,))
        numbers = {*self._holders.changed, *self._active.changed, *self._retired.changed}
        owners = {self._holders[number].worker_id for number in numbers if number in self._holders}
        for worker_id in self.changed_workers.keys() | (owners & self.workers.keys()):
            record = self.workers.get(worker_id)
            changes.put("workers", (self.number, worker_id), None if record is None else (_pack_record(record),))
            numbers |= {record.active, record.loading} - {-1} if record is not None else set()
        for number in numbers:
            holder = self._holders.get(number)
            packed = None if holder is None else (self._pack_holder(number, holder),)
            changes.put("holders", (self.number, number), packed)
        if self._holders.changed:
            changes.put("numbers", (self.number,), (self.table.last_number,))

    def confirm(self) -> None:
        """Record that the rows described last have been written."""
        for ids in self._row_ids.values():
            ids.forget_gone()

    def _pack_holder(self, number: int, holder: Holder) -> bytes:
        state = ACTIVE if number in self._active else RETIRED if number in self._retired else LOADING
        marks = self.table.marks.marked.get(number_bytes(number))
        touched = [
            (scope_id, sizes.block_size, sizes.block_bytes, sizes.tier_bytes)
            for scope_id, sizes in holder.touched.items()
        ]
        blocks_in = [(scope_id, int(tier), blocks) for (scope_id, tier), blocks in holder.blocks_in.items() if blocks]
        packed: bytes = msgpack.packb(
            (
                holder.worker_id,
                state,
                holder.digest.words,
                touched,
                blocks_in,
                None if marks is None else (marks.dropped, marks.digest.words),
            )
        )
        return packed

    # ------------------------------------------------------------ from the file

    def load(self, file: IndexFile) -> None:
        """Load this shard's rows from the file. Raises DamagedFile for a row that can't be read."""
        known: dict[bytes, bytes] = {}  # equal values are one object
        for id, scope_id, key, value, parent in file.shard_rows("blocks", self.number):
            self._row_ids["blocks"].load(id, scope_id, key)
            self._blocks.load(scope_id, key, known.setdefault(value, value))
            if parent is not None:
                self._parents.load(scope_id, key, parent)
                self.table.children.setdefault(scope_id, {}).setdefault(parent, []).append(key)
        for name, table in (("marks", self._marks), ("heads", self._heads)):
            for id, scope_id, key, value in file.shard_rows(name, self.number):
                self._row_ids[name].load(id, scope_id, key)
                table.load(scope_id, key, value)
        for number, packed in file.shard_rows("holders", self.number):
            file.read("holder", self._load_holder, number, packed)
        for worker_id, packed in file.shard_rows("workers", self.number):
            self.workers[worker_id] = file.read("worker's record", _unpack_record, packed)
        for partition, creation_us, seq in file.shard_rows("positions", self.number):
            self._positions[partition] = Position(creation_us, seq)
        for number, scope_id, key, tiers in file.shard_rows("pinned", self.number):
            self._pins[number, scope_id, key] = tiers
        for (last,) in file.shard_rows("numbers", self.number):
            self.table.last_number = last
        for one in self.changed:
            one.clear()

    def _load_holder(self, number: int, packed: bytes) -> None:
        worker_id, state, words, touched, blocks_in, marks = msgpack.unpackb(packed)
        holder = self._holders[number] = Holder(worker_id, Digest(words))
        for scope_id, size, block_bytes, tier_bytes in touched:
            holder.touched[scope_id] = BlockSizes(size, block_bytes, in_order(tier_bytes))
        holder.blocks_in.update({(scope_id, Tier(tier)): blocks for scope_id, tier, blocks in blocks_in})
        if marks is not None:
            self.table.marks.marked[number_bytes(number)] = HolderMarks(marks[0], MarkDigest(marks[1]))
        if state == ACTIVE:
            self.table.activate(number)
        elif state == RETIRED:
            self._retired[number] = None


def _pack_record(record: Record) -> bytes:
    packed: bytes = msgpack.packb([getattr(record, name) for name in Record.__slots__])
    return packed


def _unpack_record(packed: bytes) -> Record:
    values = dict(zip(Record.__slots__, msgpack.unpackb(packed), strict=True))
    return Record(**{**values, "want": tuple(values["want"])})
