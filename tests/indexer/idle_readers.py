"""Owned partitions without a bus: their readers do nothing, and are always up to date."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions, WorkerState
from kvatlas_indexer.partition.reader import PartitionStatus
from tests.indexer.bus_publisher import PARTITIONS


class IdleReader:
    """Remembers why it was restarted."""

    at_end = True

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.running = False
        self.restarts: list[str] = []

    def status(self, now_us: int) -> PartitionStatus:
        return PartitionStatus(self.partition, 0, None, None, self.at_end)

    def restart(self, why: str) -> None:
        self.restarts.append(why)

    async def run(self) -> None:
        self.running = True
        try:
            await anyio.sleep_forever()
        finally:
            self.running = False


@asynccontextmanager
async def owned_partitions(
    *partitions: int, worker_states: Sequence[WorkerState] = ()
) -> AsyncIterator[OwnedPartitions]:
    """An owner of these partitions; more can be started and stopped."""
    owned = OwnedPartitions(PARTITIONS, IdleReader, worker_states)
    async with anyio.create_task_group() as group:
        owned.run_in(group)
        owned.start(partitions)
        yield owned
        group.cancel_scope.cancel()
