"""Compares what holders have with their digests, to find damage that no message caused."""

from collections.abc import Awaitable, Callable, Sequence

from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.index.protocol import ScrubResult
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.recount import BLOCKS_A_PASS, WORKERS_A_PASS, Recount, Strays, WorkerCount

TRIES = 3
SCOPE_COST = 10
"""The cost of a call for a scope with few blocks."""
STRAYS_A_CALL = 16


class Scrub:
    """The progress of one shard's scrub, which covers some workers at a time, scope by scope, and a part of a scope per call.

    If a worker changes while it is being counted, the count catches up with it, provided that all of its messages were noted
    here. Otherwise the worker is counted again, alone and without pauses, up to TRIES times in total.
    """

    def __init__(self, keys: ShardKeys, side_index: bool) -> None:
        self._keys = keys
        self._side_index = side_index
        self._queue: list[tuple[str, int, int]] = []
        """(worker, tries so far, blocks)"""
        self._pass: Recount | None = None
        self._tries = 0

    def note(self, batches: Sequence[PartitionBatch]) -> None:
        """Note messages that are about to be applied."""
        if self._pass is not None:
            self._pass.note(batches)

    async def run(
        self,
        functions: IndexFunctions,
        list_workers: Callable[[], Awaitable[Sequence[tuple[str, int]]]],
        list_scopes: Callable[[], Awaitable[Sequence[bytes]]],
        budget_entries: int,
    ) -> ScrubResult:
        """Scan about `budget_entries` more entries. `list_workers`: returns the workers that have an active holder, each with
        its block count according to the digest; `list_scopes`: returns every known scope."""
        if self._pass is None and not self._queue:
            self._queue = [(worker_id, 0, blocks) for worker_id, blocks in await list_workers()]
        checked = strays = given_up = 0
        damaged: list[str] = []
        while self._pass is not None or self._queue:
            if self._pass is None:
                self._pass = self._next_pass(await list_scopes())
            while not self._pass.ended:
                found, cost = await self._pass.part(functions)
                strays += await self._take_out(functions, found)
                budget_entries -= SCOPE_COST + cost
                if budget_entries <= 0 and not self._tries:
                    return ScrubResult(checked, damaged, strays, given_up, False)
            counts, server = await self._pass.finish(functions), self._pass.server
            self._pass = None
            for one in counts:
                if one.state is None:
                    continue  # it no longer has an active holder
                if one.moved or (one.wrong and not await self._doubt(functions, one, server)):
                    if self._tries + 1 < TRIES:
                        self._queue.append((one.worker_id, self._tries + 1, BLOCKS_A_PASS))
                    else:
                        given_up += 1
                    continue
                checked += 1
                if one.wrong:
                    damaged.append(one.worker_id)
        return ScrubResult(checked, damaged, strays, given_up, True)

    def _next_pass(self, scope_ids: Sequence[bytes]) -> Recount:
        """A pass for the workers at the head of the queue: as many as fit. A worker that has moved before is counted alone."""
        workers: list[str] = []
        room = BLOCKS_A_PASS
        self._tries = self._queue[0][1]
        while self._queue and len(workers) < WORKERS_A_PASS:
            worker_id, tries, blocks = self._queue[0]
            if workers and (tries or blocks > room):
                break
            room -= blocks
            workers.append(worker_id)
            del self._queue[0]
            if tries:
                break
        return Recount(self._keys, workers, scope_ids)

    async def _take_out(self, functions: IndexFunctions, strays: Strays) -> int:
        k, scope_id = self._keys, strays.scope_id
        function, keys = "kvatlas_strays", [k.blocks(scope_id), k.holders]
        if strays.of_marks:
            function, keys = "kvatlas_stray_marks", [k.marks(scope_id), k.holders]
        elif self._side_index:
            keys += [k.children(scope_id), k.parents(scope_id)]
        parts = [strays.fields[at : at + STRAYS_A_CALL] for at in range(0, len(strays.fields), STRAYS_A_CALL)]
        return sum([int(await functions.call(function, keys, part)) for part in parts])

    async def _doubt(self, functions: IndexFunctions, one: WorkerCount, server: bytes) -> bool:
        """Mark the worker as `bad`. Returns False if it has begun another incarnation or been cleared in the meantime, or if
        this is not the server on which we counted."""
        assert one.state is not None
        args = [one.worker_id, one.state.incarnation, one.state.holder, server, *one.scopes]
        return bool(await functions.call("kvatlas_doubt", [self._keys.workers, self._keys.touched], args))
