"""The argument of the store's `apply`: messages grouped by worker, in the form that `functions/apply.lua` reads."""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.digest import sums_of
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.wire import CODE, HASHES, REMOVED, SCOPE_ID, STORED, TIER, sizes_of
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.call_plan import HASHES_AT, WITH_HASHES, CallBatch, Part
from kvatlas.index.redis.records import StoredRecord, pack_incarnation, pack_sizes, pairs

MAX_JOINT_BLOCKS = 1_024
"""If a call changes more blocks than this in one scope, the store changes the blocks of each worker in separate commands."""


SAMPLES = 8
SAMPLED_BLOCKS = 64
"""If a scope has fewer blocks than this in a call, only very long values make the call long, so it is enough to sample two of
them."""


@dataclass(slots=True)
class _Group:
    """Consecutive messages of one incarnation, or a part of one message. `hashes`: the hashes of each message, if each message
    is a single event and they differ only in their hashes."""

    incarnation: int
    first_seq: int
    last_seq: int
    events: list[list[Any]]
    hashes: list[bytes]
    part: Part | None

    def accepts(self, incarnation: int, seq: int, event: list[Any]) -> bool:
        """True if a message that consists of this one event continues the group and differs only in its hashes."""
        mine = self.events[0]
        return bool(
            self.hashes
            and seq == self.last_seq + 1
            and incarnation == self.incarnation
            and event[CODE] == mine[CODE]
            and event[SCOPE_ID] == mine[SCOPE_ID]
            and event[TIER] == mine[TIER]
        )

    def join(self) -> None:
        """Merge all events into one."""
        if len(self.hashes) > 1:
            self.events = [[*self.events[0][:HASHES], b"".join(self.hashes), *self.events[0][HASHES + 1 :]]]

    def encode(self, repeating: Collection[bytes]) -> tuple[Any, ...]:
        events = [_with_sums(event, repeating) if event[CODE] in WITH_HASHES else event for event in self.events]
        fields = pack_incarnation(self.incarnation), self.first_seq, self.last_seq, events
        return fields if self.part is None else (*fields, self.part.first_step, int(self.part.last), self.part.ends)


def _with_sums(event: list[Any], repeating: Collection[bytes]) -> list[Any]:
    """The event without repeated hashes (the store's function counts every hash, and publishers repeat none), and with the sums
    of its hashes, which are more expensive to compute in the store."""
    packed = event[HASHES]
    if event[SCOPE_ID] in repeating:
        hashes = array("Q", packed)
        if len(set(hashes)) != len(hashes):
            packed = array("Q", dict.fromkeys(hashes)).tobytes()
            event = [*event[:HASHES], packed, *event[HASHES + 1 :]]
    return [*event, *sums_of(packed)]


def _may_repeat(packed_hashes: bytes) -> bool:
    """True if two of these events may contain the same block. With many blocks, checking is not worthwhile: see
    MAX_JOINT_BLOCKS."""
    blocks = len(packed_hashes) // HASH_BYTES
    return blocks > MAX_JOINT_BLOCKS or len(set(array("Q", packed_hashes))) != blocks


@dataclass(slots=True)
class _WorkerMessages:
    """By incarnation and scope: `entries` holds the last entry, and `sizes` the sizes known from all of them."""

    partition: int
    entries: dict[tuple[int, bytes], list[Any]] = field(default_factory=dict)
    sizes: dict[tuple[int, bytes], BlockSizes] = field(default_factory=dict)
    groups: list[_Group] = field(default_factory=list)

    def use(self, incarnation: int, scope_id: bytes, entry: list[Any]) -> None:
        """Note the entry of a scope, which may differ from the previous one."""
        key = incarnation, scope_id
        before = self.entries.get(key)
        if before != entry:
            self.entries[key] = entry
            new = sizes_of(entry)
            self.sizes[key] = new if before is None else self.sizes[key].updated(new)

    @property
    def uses(self) -> dict[bytes, dict[bytes, bytes]]:
        """The sizes by incarnation and scope, in the form that the store's function reads."""
        uses: dict[bytes, dict[bytes, bytes]] = {}
        for (incarnation, scope_id), sizes in self.sizes.items():
            uses.setdefault(pack_incarnation(incarnation), {})[scope_id] = pack_sizes(sizes)
        return uses


def pack_call(
    reuse_ms: int, most_cost: float, call: Sequence[CallBatch], *, parents: bool = False
) -> tuple[list[bytes], list[bytes], bytes]:
    """(scope ids whose blocks the call needs, in order; those whose marks it needs as well; the packed argument). The work is
    per message: a block costs a set entry and two additions.

    Consecutive messages of a worker with the same kind of event, scope and tier travel as one group. If the worker's seq lies
    inside a group, the first messages of the group are applied again, which changes nothing: either all of them are stores, or
    all are removals. The store applies nothing if it finds that the blocks cost more than `most_cost`. `parents` keeps messages
    separate, because each has a parent of its own (side index).
    """
    hashes_by_scope: dict[bytes, list[bytes]] = {}
    positions: list[tuple[int, int, int, int]] = []
    workers: dict[str, _WorkerMessages] = {}
    marked: set[bytes] = set()
    for batch, messages, complete in call:
        if batch.position is not None:
            after = -1 if batch.after_seq is None else batch.after_seq
            reached = batch.position.seq if complete else after
            positions.append((batch.partition, batch.position.creation_us, after, reached))
        for message in messages:
            _, worker_id, incarnation, seq, _, scopes, _ = message.raw
            events, part = message.events, message.part
            worker = workers.get(worker_id)
            if worker is None:
                worker = workers[worker_id] = _WorkerMessages(batch.partition)
            for event in events:
                if event[CODE] in HASHES_AT:
                    scope_id = event[SCOPE_ID]
                    some = hashes_by_scope.setdefault(scope_id, [])
                    if event[CODE] in WITH_HASHES:
                        some.append(event[HASHES])
                    else:
                        marked.add(scope_id)
                    worker.use(incarnation, scope_id, scopes[scope_id])
            alike = not parents and part is None and len(events) == 1 and events[0][CODE] in (STORED, REMOVED)
            if alike and worker.groups and worker.groups[-1].accepts(incarnation, seq, events[0]):
                group = worker.groups[-1]
                group.last_seq = seq
                group.hashes.append(events[0][HASHES])
            else:
                hashes = [events[0][HASHES]] if alike else []
                worker.groups.append(_Group(incarnation, seq, seq, events, hashes, part))
    for worker in workers.values():
        for group in worker.groups:
            group.join()
    packed_by_scope = {scope_id: b"".join(some) for scope_id, some in hashes_by_scope.items()}
    repeating = {scope_id for scope_id, packed in packed_by_scope.items() if _may_repeat(packed)}
    by_worker = [
        (worker_id, worker.partition, worker.uses, [group.encode(repeating) for group in worker.groups])
        for worker_id, worker in workers.items()
    ]
    scopes = [
        (scope_id, int(scope_id in repeating), len(packed) // HASH_BYTES, _sample(packed))
        for scope_id, packed in packed_by_scope.items()
    ]
    with_marks = [scope_id for scope_id in packed_by_scope if scope_id in marked]
    numbers = [number for number, scope_id in enumerate(packed_by_scope, 1) if scope_id in marked]
    # the store's Lua reads byte strings only in msgpack's older form, where text and bytes are one type
    argument = msgpack.packb((reuse_ms, most_cost, scopes, positions, by_worker, numbers), use_bin_type=False)
    return list(packed_by_scope), with_marks, argument


def _sample(packed_hashes: bytes) -> bytes:
    """Some of the hashes, spread evenly. The lengths of their values show the store what the call will cost."""
    blocks = len(packed_hashes) // HASH_BYTES
    if blocks < SAMPLED_BLOCKS:
        return packed_hashes[:HASH_BYTES] + packed_hashes[-HASH_BYTES:]
    step = blocks // SAMPLES * HASH_BYTES
    return b"".join(packed_hashes[at : at + HASH_BYTES] for at in range(0, SAMPLES * step, step))


class ApplyAnswer(NamedTuple):
    """`weights`: the cost of a block in each scope, relative to a block with a short value. `records=None`: nothing was
    applied, because the call is too large according to these weights and must be cut into smaller ones."""

    weights: Sequence[float]
    records: list[WorkerRecord] | None
    counts: ApplyCounts
    moved: list[int]


def unpack_answer(answer: bytes) -> ApplyAnswer:
    """Unpack the answer of `functions/apply.lua`."""
    weights, *rest = msgpack.unpackb(answer, raw=True)
    if not rest:
        return ApplyAnswer(weights, None, ApplyCounts(), [])
    counts, moved, flat = rest
    records = [StoredRecord.unpack(packed).of_worker(worker_id.decode()) for worker_id, packed in pairs(flat)]
    return ApplyAnswer(weights, records, ApplyCounts(*counts), moved)
