"""The argument of the store's `apply`: messages grouped by worker, as `functions/apply.lua` reads them."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any

import msgpack

from kvatlas.blocks.digest import sums_of
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.wire import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    CHUNK,
    CODE,
    FLAGS,
    HASHES,
    HEADS,
    MARKED,
    REMOVED,
    SCOPE_ID,
    STORED,
    TIER,
    UNMARKED,
)
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.protocol import PartitionBatch, WorkerRecord
from kvatlas.index.redis.records import StoredRecord, pack_incarnation, pairs

_WITH_HASHES = (STORED, REMOVED, CHUNK)
_OF_MARKS = (MARKED, UNMARKED, HEADS)

MAX_JOINT_BLOCKS = 1_024
"""If a call changes more blocks of one scope, the store changes each worker's in commands of its own."""


@dataclass(slots=True)
class _Group:
    """Consecutive messages of one incarnation. `parts`: each message's hashes, if all are one event that differs in nothing
    else."""

    incarnation: int
    first_seq: int
    last_seq: int
    events: list[list[Any]]
    parts: list[bytes]

    def accepts(self, incarnation: int, seq: int, event: list[Any]) -> bool:
        """Does a message of this one event continue the group, with a difference only in its hashes?"""
        mine = self.events[0]
        return bool(
            self.parts
            and seq == self.last_seq + 1
            and incarnation == self.incarnation
            and event[CODE] == mine[CODE]
            and event[SCOPE_ID] == mine[SCOPE_ID]
            and event[TIER] == mine[TIER]
            and (event[CODE] == REMOVED or event[FLAGS] == mine[FLAGS])
        )

    def join(self) -> None:
        """Make one event of all."""
        if len(self.parts) > 1:
            self.events = [[*self.events[0][:HASHES], b"".join(self.parts), *self.events[0][HASHES + 1 :]]]

    def encode(self, repeating: Collection[bytes]) -> tuple[bytes, int, int, list[list[Any]]]:
        events = [_with_sums(event, repeating) if event[CODE] in _WITH_HASHES else event for event in self.events]
        return pack_incarnation(self.incarnation), self.first_seq, self.last_seq, events


def _with_sums(event: list[Any], repeating: Collection[bytes]) -> list[Any]:
    """The event without repetitions (the store's function counts every hash; publishers repeat none), and with the sums of
    its hashes, which cost more there."""
    packed = event[HASHES]
    if event[SCOPE_ID] in repeating:
        hashes = array("Q", packed)
        if len(set(hashes)) != len(hashes):
            packed = array("Q", dict.fromkeys(hashes)).tobytes()
            event = [*event[:HASHES], packed, *event[HASHES + 1 :]]
    return [*event, *sums_of(packed)]


def _repeating_scopes(events: Iterable[list[Any]]) -> set[bytes]:
    """The scopes in which two of these events may have the same block. With many blocks that is not worth looking for: see
    MAX_JOINT_BLOCKS."""
    by_scope: dict[bytes, list[bytes]] = {}
    for event in events:
        if event[CODE] in _WITH_HASHES:
            by_scope.setdefault(event[SCOPE_ID], []).append(event[HASHES])
    return {scope_id for scope_id, some in by_scope.items() if _may_repeat(b"".join(some))}


def _may_repeat(packed_hashes: bytes) -> bool:
    blocks = len(packed_hashes) // HASH_BYTES
    return blocks > MAX_JOINT_BLOCKS or len(set(array("Q", packed_hashes))) != blocks


@dataclass(slots=True)
class _WorkerMessages:
    partition: int
    uses: dict[bytes, bytes]
    groups: list[_Group]


def pack_call(
    reuse_ms: int, batches: Sequence[PartitionBatch], *, parents: bool = False
) -> tuple[list[bytes], list[bytes], bytes]:
    """(scope ids whose blocks the call needs, in order; those of them whose marks it needs; the packed argument). Work is per
    message: a block costs an entry of a set and two additions.

    A worker's consecutive messages with the same kind of event, scope, tier and flags travel as one group. If the worker's
    seq is inside a group, its first messages are applied again, which changes nothing: all are stores, or all removals.
    `parents` keeps messages apart, because each has a parent of its own (side index).
    """
    scope_ids: dict[bytes, None] = {}
    positions: list[tuple[int, int, int, int]] = []
    workers: dict[str, _WorkerMessages] = {}
    for batch in batches:
        if batch.position is not None:
            after = -1 if batch.after_seq is None else batch.after_seq
            positions.append((batch.partition, batch.position.creation_us, after, batch.position.seq))
        for _, worker_id, incarnation, seq, _, scopes, events in batch.messages:
            worker = workers.get(worker_id)
            if worker is None:
                worker = workers[worker_id] = _WorkerMessages(batch.partition, {}, [])
            for scope_id, entry in scopes.items():
                if scope_id not in worker.uses:
                    worker.uses[scope_id] = pack(">II", entry[BLOCK_SIZE], entry[BLOCK_BYTES])
                    scope_ids[scope_id] = None
            alike = not parents and len(events) == 1 and events[0][CODE] in (STORED, REMOVED)
            if alike and worker.groups and worker.groups[-1].accepts(incarnation, seq, events[0]):
                group = worker.groups[-1]
                group.last_seq = seq
                group.parts.append(events[0][HASHES])
            else:
                worker.groups.append(_Group(incarnation, seq, seq, events, [events[0][HASHES]] if alike else []))
    groups = [group for worker in workers.values() for group in worker.groups]
    for group in groups:
        group.join()
    repeating = _repeating_scopes(event for group in groups for event in group.events)
    by_worker = [
        (worker_id, worker.partition, worker.uses, [group.encode(repeating) for group in worker.groups])
        for worker_id, worker in workers.items()
    ]
    scopes = [(scope_id, int(scope_id in repeating)) for scope_id in scope_ids]
    marked = {event[SCOPE_ID] for group in groups for event in group.events if event[CODE] in _OF_MARKS}
    with_marks = [scope_id for scope_id in scope_ids if scope_id in marked] if marked else []
    numbers = [number for number, scope_id in enumerate(scope_ids, 1) if scope_id in marked]
    # the store's Lua reads byte strings only in msgpack's older form, where text and bytes are one type
    argument = msgpack.packb((reuse_ms, scopes, positions, by_worker, numbers), use_bin_type=False)
    return list(scope_ids), with_marks, argument


def unpack_answer(answer: bytes) -> tuple[list[WorkerRecord], ApplyCounts, list[int]]:
    """The workers' records after the call, what it did, and the partitions whose stored position is another."""
    counts, moved, flat = msgpack.unpackb(answer, raw=True)
    records = [StoredRecord.unpack(packed).of_worker(worker_id.decode()) for worker_id, packed in pairs(flat)]
    return records, ApplyCounts(*counts), moved
