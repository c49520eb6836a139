"""The running readers of one replica, and the state that belongs to them."""

from collections.abc import Callable

import anyio
import pytest

from kvatlas.bus.subjects import partition_of
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS
from tests.indexer.idle_readers import IdleReader, owned_partitions

pytestmark = pytest.mark.anyio

WORKERS = ("w0", "w1", "w2")
PARTITION = {worker_id: partition_of(worker_id, PARTITIONS) for worker_id in WORKERS}


class RememberedWorkers:
    """State by worker."""

    def __init__(self) -> None:
        self.workers = set(WORKERS)

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        self.workers = {worker_id for worker_id in self.workers if not is_gone(worker_id)}


async def test_a_worker_is_owned_while_its_partition_is() -> None:
    async with owned_partitions(PARTITION["w0"]) as owned:
        assert owned.owns("w0") and not owned.owns("w1")
        owned.start([PARTITION["w1"]])
        assert owned.owns("w1")
        await owned.stop([PARTITION["w0"]])
        assert not owned.owns("w0")
        assert list(owned.partitions) == [PARTITION["w1"]]


async def test_a_stopped_reader_has_ended_when_stop_returns() -> None:
    readers: list[IdleReader] = []

    def new_reader(partition: int) -> IdleReader:
        readers.append(IdleReader(partition))
        return readers[-1]

    owned = OwnedPartitions(PARTITIONS, new_reader)
    async with anyio.create_task_group() as group:
        owned.run_in(group)
        owned.start([3, 5])
        await until(lambda: all(reader.running for reader in readers), what="both readers run")
        await owned.stop([3, 4])
        assert [reader.running for reader in readers] == [False, True]
        await owned.stop([5])


async def test_a_partition_that_is_not_owned_is_not_at_its_end_and_not_restarted() -> None:
    async with owned_partitions(PARTITION["w0"]) as owned:
        assert owned.at_end("w0") and not owned.at_end("w1")
        owned.restart(PARTITION["w1"], "nothing to restart")


async def test_a_restart_reaches_the_partitions_reader() -> None:
    reader = IdleReader(7)
    owned = OwnedPartitions(PARTITIONS, lambda _: reader)
    async with anyio.create_task_group() as group:
        owned.run_in(group)
        owned.start([7])
        owned.restart(7, "the store lost its position")
        assert reader.restarts == ["the store lost its position"]
        await owned.stop([7])


async def test_status_is_by_partition_ascending() -> None:
    async with owned_partitions(9, 2, 30) as owned:
        assert [status.partition for status in owned.status(0)] == [2, 9, 30]


async def test_workers_of_stopped_partitions_and_retired_workers_are_forgotten() -> None:
    state = RememberedWorkers()
    async with owned_partitions(*PARTITION.values(), worker_states=[state]) as owned:
        await owned.stop([PARTITION["w0"]])
        assert state.workers == {"w1", "w2"}
        owned.forget_worker("w1")
        assert state.workers == {"w2"}
        assert owned.owns("w1")


async def test_listeners_are_called_after_each_start() -> None:
    owned_at_start: list[list[int]] = []
    async with owned_partitions() as owned:
        owned.on_start(lambda: owned_at_start.append(sorted(owned.partitions)))
        owned.start([1])
        owned.start([2, 3])
        await owned.stop([1])
    assert owned_at_start == [[1], [1, 2, 3]]
