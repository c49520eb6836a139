"""Compares the digests of the copy's workers with the store's, at the same message."""

from collections.abc import Sequence

import msgpack

from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.local_copy.comparison import moment_of
from kvatlas.index.memory.shard import MemoryShard
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import HolderState, MarksState, unpack_incarnation

WORKERS_A_CALL = 32


async def differing_workers(
    functions: IndexFunctions, keys: ShardKeys, shard: MemoryShard, worker_ids: Sequence[str]
) -> tuple[list[str], int]:
    """The workers whose blocks or marks differ, and how many could be compared. A worker whose messages arrive faster than
    the store answers is left out. Raises Unreachable."""
    wrong: list[str] = []
    compared = 0
    for first in range(0, len(worker_ids), WORKERS_A_CALL):
        some = worker_ids[first : first + WORKERS_A_CALL]
        k = [keys.workers, keys.holders, keys.active, keys.digests, keys.steps, keys.marked]
        answers = await functions.call_ro_many("kvatlas_look", [(k, [worker_id]) for worker_id in some])
        for worker_id, packed in zip(some, answers, strict=True):
            _, fields, _ = msgpack.unpackb(packed, raw=True)
            same = _has_same_blocks(shard, worker_id, HolderState.of(fields))
            compared += same is not None
            if same is False:
                wrong.append(worker_id)
        if not shard.table.marks.marked:
            continue
        k = [keys.workers, keys.marked, keys.steps]
        answers = await functions.call_ro_many("kvatlas_look_marks", [(k, [worker_id]) for worker_id in some])
        for worker_id, packed in zip(some, answers, strict=True):
            _, fields, _ = msgpack.unpackb(packed, raw=True)
            if _has_same_marks(shard, worker_id, MarksState.of(fields)) is False:
                wrong.append(worker_id)
    return wrong, compared


def _has_same_blocks(shard: MemoryShard, worker_id: str, state: HolderState | None) -> bool | None:
    """True if both have the same blocks; None: they can't be compared now."""
    record = shard.workers.get(worker_id)
    if state is None or not _same_moment(shard, worker_id, state) or record is None:
        return None
    return shard.table.holders[record.active].digest.words == list(state.digest)


def _has_same_marks(shard: MemoryShard, worker_id: str, state: MarksState | None) -> bool | None:
    record = shard.workers.get(worker_id)
    if state is None or not _same_moment(shard, worker_id, state) or record is None:
        return None
    marks = shard.table.marks.marked.get(number_bytes(record.active))
    return (marks.digest.words if marks is not None else []) == list(state.words or [])


def _same_moment(shard: MemoryShard, worker_id: str, state: HolderState | MarksState) -> bool:
    record = shard.workers.get(worker_id)
    if record is None or record.active < 0 or state.steps:
        return False
    return moment_of(record) == (unpack_incarnation(state.incarnation), state.seq)
