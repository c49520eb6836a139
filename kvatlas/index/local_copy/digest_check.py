"""Compares the digests of the workers in the copy and in the store, as of the same message."""

from collections.abc import Sequence

from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.local_copy.comparison import moment_of
from kvatlas.index.memory.shard import MemoryShard
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.records import HolderState, unpack_incarnation

WORKERS_A_CALL = 32


async def differing_workers(
    functions: IndexFunctions, keys: ShardKeys, shard: MemoryShard, worker_ids: Sequence[str]
) -> tuple[list[str], int]:
    """The workers whose blocks or marks differ, and the number of workers that could be compared. A worker whose messages
    arrive faster than the store answers is left out. Raises Unreachable."""
    wrong: list[str] = []
    compared = 0
    for first in range(0, len(worker_ids), WORKERS_A_CALL):
        some = worker_ids[first : first + WORKERS_A_CALL]
        calls = [(keys.of_state, [worker_id]) for worker_id in some]
        answers = await functions.call_ro_many("kvatlas_look", calls)
        for worker_id, packed in zip(some, answers, strict=True):
            same = _is_same(shard, worker_id, HolderState.unpack(packed))
            compared += same is not None
            if same is False:
                wrong.append(worker_id)
    return wrong, compared


def _is_same(shard: MemoryShard, worker_id: str, state: HolderState | None) -> bool | None:
    """True if both have the same blocks and marks; None if they can't be compared now."""
    record = shard.workers.get(worker_id)
    if state is None or state.steps or record is None or record.active < 0:
        return None
    if moment_of(record) != (unpack_incarnation(state.incarnation), state.seq):
        return None
    marks = shard.table.marks.marked.get(number_bytes(record.active))
    same_marks = (marks.digest.words if marks is not None else []) == list(state.marks or [])
    return same_marks and shard.table.holders[record.active].digest.words == list(state.digest)
