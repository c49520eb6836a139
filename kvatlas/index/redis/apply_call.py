"""The one argument of the store's `apply`: messages grouped by worker, in the form that `functions/apply.lua` reads."""

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from struct import pack
from typing import Any, cast

import msgpack

from kvatlas.blocks.digest import sums_of
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.wire import BLOCK_BYTES, BLOCK_SIZE, CHUNK, CODE, FLAGS, HASHES, REMOVED, SCOPE_ID, STORED, TIER
from kvatlas.index.protocol import Applied, PartitionBatch, WorkerRecord

_COUNTS = ("applied", "duplicates", "stale", "gaps", "refused", "failed_checks", "stored", "removed", "bytes_written")


_WITH_HASHES = (STORED, REMOVED, CHUNK)

MOST_TOGETHER = 1_024
"""Blocks of one scope in a call up to which the store changes those of several workers together."""


@dataclass(slots=True)
class _Group:
    """Consecutive messages of one incarnation. `parts` are the hashes of one event that they all say."""

    incarnation: int
    first_seq: int
    last_seq: int
    events: list[list[Any]]
    parts: list[bytes]

    def takes(self, incarnation: int, seq: int, event: list[Any]) -> bool:
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
        """Make one event of what all say."""
        if len(self.parts) > 1:
            self.events = [[*self.events[0][:HASHES], b"".join(self.parts), *self.events[0][HASHES + 1 :]]]

    def packed(self, repeating: Collection[bytes]) -> tuple[bytes, int, int, list[list[Any]]]:
        events = [_summed(event, repeating) if event[CODE] in _WITH_HASHES else event for event in self.events]
        return self.incarnation.to_bytes(8, "big"), self.first_seq, self.last_seq, events


def _summed(event: list[Any], repeating: Collection[bytes]) -> list[Any]:
    """The event without repetitions (the store's function counts what it is told; a publisher repeats nothing), and with the
    sums of its hashes, which are dearer to make there."""
    packed = event[HASHES]
    if event[SCOPE_ID] in repeating:
        hashes = array("Q", packed)
        if len(set(hashes)) != len(hashes):
            packed = array("Q", dict.fromkeys(hashes)).tobytes()
            event = [*event[:HASHES], packed, *event[HASHES + 1 :]]
    return [*event, *sums_of(packed)]


def _repeating(events: Iterable[list[Any]]) -> set[bytes]:
    """The scopes of which these events may tell a block twice. Where they tell many blocks, nobody looks: the store then
    changes each worker's in commands of its own, which are long enough."""
    told: dict[bytes, list[bytes]] = {}
    for event in events:
        if event[CODE] in _WITH_HASHES:
            told.setdefault(event[SCOPE_ID], []).append(event[HASHES])
    return {scope_id for scope_id, some in told.items() if _may_repeat(b"".join(some))}


def _may_repeat(packed_hashes: bytes) -> bool:
    blocks = len(packed_hashes) // HASH_BYTES
    return blocks > MOST_TOGETHER or len(set(array("Q", packed_hashes))) != blocks


@dataclass(slots=True)
class _Teller:
    partition: int
    uses: dict[bytes, bytes]
    groups: list[_Group]


def pack_call(reuse_ms: int, batches: Sequence[PartitionBatch], *, parents: bool = False) -> tuple[list[bytes], bytes]:
    """(scope ids whose keys the call needs, in order; the packed argument). Work is per message: a block costs an entry of a
    set and two additions.

    Consecutive messages of a worker that say the same thing of the same scope and tier travel as one group. Where the
    worker's seq stands inside a group, what it told before is told again, and that changes nothing: only stores, or only
    removals, lie between. `parents` keeps messages apart, because each has a parent of its own (side index).
    """
    scope_ids: dict[bytes, None] = {}
    positions: list[tuple[int, int, int, int]] = []
    tellers: dict[str, _Teller] = {}
    for batch in batches:
        if batch.position is not None:
            after = -1 if batch.after_seq is None else batch.after_seq
            positions.append((batch.partition, batch.position.creation_us, after, batch.position.seq))
        for _, worker_id, incarnation, seq, _, scopes, events in batch.messages:
            teller = tellers.get(worker_id)
            if teller is None:
                teller = tellers[worker_id] = _Teller(batch.partition, {}, [])
            for scope_id, entry in scopes.items():
                if scope_id not in teller.uses:
                    teller.uses[scope_id] = pack(">II", entry[BLOCK_SIZE], entry[BLOCK_BYTES])
                    scope_ids[scope_id] = None
            alike = not parents and len(events) == 1 and events[0][CODE] in (STORED, REMOVED)
            if alike and teller.groups and teller.groups[-1].takes(incarnation, seq, events[0]):
                group = teller.groups[-1]
                group.last_seq = seq
                group.parts.append(events[0][HASHES])
            else:
                teller.groups.append(_Group(incarnation, seq, seq, events, [events[0][HASHES]] if alike else []))
    groups = [group for teller in tellers.values() for group in teller.groups]
    for group in groups:
        group.join()
    repeating = _repeating(event for group in groups for event in group.events)
    told = [
        (worker_id, teller.partition, teller.uses, [group.packed(repeating) for group in teller.groups])
        for worker_id, teller in tellers.items()
    ]
    scopes = [(scope_id, int(scope_id in repeating)) for scope_id in scope_ids]
    # the store's Lua reads byte strings only in msgpack's older form, where text and bytes are one type
    return list(scope_ids), msgpack.packb((reuse_ms, scopes, positions, told), use_bin_type=False)


def unpack_answer(answer: bytes) -> tuple[Applied, dict[str, int]]:
    """What became of the batch, and the counts of the call by name."""
    counts, moved, flat = msgpack.unpackb(answer, raw=True)
    named = dict(zip(_COUNTS, counts, strict=True))
    records = list(records_of(flat[i : i + 2] for i in range(0, len(flat), 2)))
    applied = Applied(
        records,
        named["applied"],
        named["duplicates"],
        named["stale"],
        named["gaps"],
        named["refused"],
        named["failed_checks"],
        tuple(moved),
    )
    return applied, named


def records_of(pairs: Iterable[Sequence[bytes]]) -> Iterable[WorkerRecord]:
    """Worker records of (worker id, packed record) pairs as the store keeps them (`functions/_slot.lua`)."""
    for worker_id, packed in pairs:
        fields = msgpack.unpackb(packed, raw=True)
        incarnation, seq, active, loading, bad, closed, oom, want_incarnation, want_seq, _, partition = fields
        yield WorkerRecord(
            worker_id.decode(),
            int.from_bytes(incarnation, "big"),
            seq,
            partition,
            bool(bad),
            bool(closed),
            bool(oom),
            (int.from_bytes(want_incarnation, "big"), want_seq),
            answering=active != b"",
            loading=loading != b"",
        )


def active_holder(packed: bytes) -> bytes:
    """The 3-byte number of a packed record's active holder; empty where it has none."""
    return cast(bytes, msgpack.unpackb(packed, raw=True)[2])
