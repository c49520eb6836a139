"""The store: the memory index's shards behind calls that may be interrupted, lose their answer, or be undone by a failover."""

import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.errors import Unreachable
from kvatlas.fleet.records import FleetRecord
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.memory.shard import MemoryShard
from kvatlas.index.protocol import ApplyResult, Room, ScrubResult, WorkerRecord
from tests.logic.steps import pause

if TYPE_CHECKING:
    from tests.logic.world import World

KEPT_STATES = 12


class SteppedIndex(MemoryIndex):
    """Other tasks may run before each call is carried out, and before its answer arrives."""

    def __init__(self, world: "World", partitions: int, shards: int) -> None:
        super().__init__(partitions, shards)
        self.world = world
        self._past: list[deque[bytes]] = [deque(maxlen=KEPT_STATES) for _ in range(shards)]

    # ------------------------------------------------------------ faults

    def failover(self, shard: int, calls: int) -> None:
        """Let a replica without the last calls' writes take over."""
        state = None
        for _ in range(min(calls, len(self._past[shard]))):
            state = self._past[shard].pop()
        if state is not None:
            full = self._shards[shard].full
            self._shards[shard] = pickle.loads(state)  # noqa: S301 (made here)
            self._shards[shard].full = full

    def wipe(self, shard: int) -> None:
        self._shards[shard] = MemoryShard()
        self._past[shard].clear()

    def fill(self, shard: int, full: bool) -> None:
        """`full`: the shard's store has no memory left."""
        self._shards[shard].full = full

    def shard_states(self) -> list[MemoryShard]:
        return self._shards

    def shard_of_worker(self, worker_id: str) -> MemoryShard:
        return self._shard_of(worker_id)

    # ------------------------------------------------------------ calls

    async def _before(self, shard: int | None = None) -> None:
        await pause()
        if self.world.fault("away", 0.02):
            raise Unreachable("the store does not answer")
        if shard is not None:
            self._past[shard].append(pickle.dumps(self._shards[shard]))

    async def _after(self) -> None:
        await pause()
        if self.world.fault("away", 0.02):
            raise Unreachable("the store's answer is lost")

    async def apply(self, shard: int, batches: Sequence[PartitionBatch]) -> ApplyResult:
        await self._before(shard)
        applied = await super().apply(shard, batches)
        self.world.stats["without room"] += sum(record.oom for record in applied.records)
        self.world.invariants.check()
        await self._after()
        return applied

    async def retire(self, worker_id: str, incarnation: int) -> bool:
        await self._before(self.world.partition_of(worker_id) % self.shards)
        retired = await super().retire(worker_id, incarnation)
        self.world.stats["retired"] += retired
        await self._after()
        return retired

    async def sweep(self, shard: int, budget_blocks: int) -> int:
        await self._before(shard)
        left = await super().sweep(shard, budget_blocks)
        await self._after()
        return left

    async def scrub(self, shard: int, budget_blocks: int, partitions: Collection[int] | None = None) -> ScrubResult:
        await self._before(shard)
        found = await super().scrub(shard, budget_blocks, partitions)
        self.world.stats["damaged"] += len(found.damaged)
        self.world.stats["strays"] += found.strays
        await self._after()
        return found

    async def room(self, shard: int) -> Room:
        await self._before()
        return Room(100 if self._shards[shard].full else 50, 100, False)

    async def record(self, worker_id: str) -> WorkerRecord | None:
        await self._before()
        return await super().record(worker_id)

    async def records(self, shard: int) -> Sequence[WorkerRecord]:
        await self._before()
        return await super().records(shard)

    async def position(self, partition: int) -> Position | None:
        await self._before()
        return await super().position(partition)

    async def set_position(self, partition: int, expected: Position | None, new: Position) -> Position | None:
        await self._before(partition % self.shards)
        stored = await super().set_position(partition, expected, new)
        await self._after()
        return stored


class Fleet:
    """The fleet's records (as `kvatlas.fleet_store.fleet_store.FleetStore`)."""

    def __init__(self) -> None:
        self.records: dict[str, FleetRecord] = {}
        self.pools_repaired = 0

    async def write(self, records: Mapping[str, FleetRecord]) -> None:
        await pause()
        self.records.update(records)

    async def update_existing(self, records: Mapping[str, FleetRecord]) -> None:
        there = {worker_id: record for worker_id, record in records.items() if worker_id in self.records}
        await self.write(there)

    async def forget(self, worker_id: str, pool_id: str) -> None:
        await pause()
        self.records.pop(worker_id, None)

    async def record_departure(self, *_: object) -> None:
        await pause()

    async def forget_departures(self, worker_ids: Collection[str]) -> None:
        await pause()

    async def entries(self, which: Callable[[str, str], bool]) -> list[tuple[str, str, FleetRecord | None]]:
        await pause()
        named = [(worker_id, record.endpoint.pool_id, record) for worker_id, record in self.records.items()]
        return [(worker_id, pool_id, record) for worker_id, pool_id, record in named if which(worker_id, pool_id)]
