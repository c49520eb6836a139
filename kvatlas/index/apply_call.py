"""The one argument of the store's `apply`: messages grouped by worker, in the form that `functions/apply.lua` reads."""

from collections.abc import Iterable, Sequence
from struct import pack
from typing import Any, cast

import msgpack

from kvatlas.index.protocol import Applied, PartitionBatch, WorkerRecord

_COUNTS = ("applied", "duplicates", "stale", "gaps", "refused", "failed_checks", "stored", "removed", "bytes_written")


def pack_call(reuse_ms: int, batches: Sequence[PartitionBatch]) -> tuple[list[bytes], bytes]:
    """(scope ids whose keys the call needs, in order; the packed argument). Work is per message, never per block."""
    scope_ids: dict[bytes, None] = {}
    positions: list[tuple[int, int, int, int]] = []
    tellers: dict[str, tuple[str, int, dict[bytes, bytes], list[tuple[bytes, int, Any]]]] = {}
    for batch in batches:
        if batch.position is not None:
            after = -1 if batch.after_seq is None else batch.after_seq
            positions.append((batch.partition, batch.position.creation_us, after, batch.position.seq))
        for _, worker_id, incarnation, seq, _, scopes, events in batch.messages:
            teller = tellers.get(worker_id)
            if teller is None:
                teller = tellers[worker_id] = (worker_id, batch.partition, {}, [])
            uses = teller[2]
            for scope_id, entry in scopes.items():
                if scope_id not in uses:
                    uses[scope_id] = pack(">II", entry[4], entry[5])
                    scope_ids[scope_id] = None
            teller[3].append((incarnation.to_bytes(8, "big"), seq, events))
    # the store's Lua reads byte strings only in msgpack's older form, where text and bytes are one type
    argument = msgpack.packb(
        (reuse_ms, list(scope_ids), positions, list(tellers.values())), use_bin_type=False
    )
    return list(scope_ids), argument


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
