"""The partitions that this replica currently owns: their running readers, and the state that belongs to them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from kvatlas.bus.subjects import partition_of
from kvatlas_indexer.partition.reader import PartitionStatus

WORKERS_REMEMBERED = 100_000


class Reader(Protocol):
    """Reads one partition for as long as `run` runs."""

    @property
    def at_end(self) -> bool:
        """True if everything that the stream holds for the partition has been applied."""

    def status(self, now_us: int) -> PartitionStatus: ...

    def restart(self, why: str) -> None:
        """Read again from the stored position."""

    async def run(self) -> None: ...


class WorkerState(Protocol):
    """Per-worker state that is kept only for workers of owned partitions."""

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Drop the state of the workers for which `is_gone` is true."""


@dataclass(slots=True)
class _RunningReader:
    reader: Reader
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        try:
            with self.scope:
                await self.reader.run()
        finally:
            self.ended.set()


class OwnedPartitions:
    def __init__(
        self, partitions: int, new_reader: Callable[[int], Reader], worker_states: Iterable[WorkerState] = ()
    ) -> None:
        """`partitions`: the number of partitions. `worker_states` are asked to forget retired workers, and the workers of
        stopped partitions."""
        self.partition_of: Callable[[str], int] = lru_cache(WORKERS_REMEMBERED)(
            lambda worker_id: partition_of(worker_id, partitions)
        )
        """The partition of a worker, by its id."""
        self._new_reader = new_reader
        self._worker_states = tuple(worker_states)
        self._on_start: list[Callable[[], None]] = []
        self._running: dict[int, _RunningReader] = {}
        self._group: TaskGroup | None = None

    def run_in(self, group: TaskGroup) -> None:
        """Run the readers in this task group. Must be called before `start`."""
        self._group = group

    @property
    def partitions(self) -> Collection[int]:
        return self._running.keys()

    def status(self, now_us: int) -> list[PartitionStatus]:
        """The status of each owned partition, in ascending order."""
        return [running.reader.status(now_us) for _, running in sorted(self._running.items())]

    def owns(self, worker_id: str) -> bool:
        """True if this replica owns the worker's partition."""
        return self.partition_of(worker_id) in self._running

    def at_end(self, worker_id: str) -> bool:
        """True if the worker's partition has been read to the end."""
        running = self._running.get(self.partition_of(worker_id))
        return running is not None and running.reader.at_end

    def restart(self, partition: int, why: str) -> None:
        """Read this partition again from its stored position, if this replica owns it."""
        if (running := self._running.get(partition)) is not None:
            running.reader.restart(why)

    def on_start(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever partitions are started."""
        self._on_start.append(listener)

    def start(self, partitions: Sequence[int]) -> None:
        assert self._group is not None
        for partition in partitions:
            running = self._running[partition] = _RunningReader(self._new_reader(partition))
            self._group.start_soon(running.run)
        for listener in self._on_start:
            listener()

    async def stop(self, partitions: Sequence[int]) -> None:
        """Stop the readers of these partitions, wait for them to end, and forget the workers that this replica no longer
        owns."""
        stopped = [self._running.pop(partition) for partition in partitions if partition in self._running]
        for running in stopped:
            running.scope.cancel()
        for running in stopped:
            await running.ended.wait()
        self._forget(lambda worker_id: not self.owns(worker_id))

    def forget_worker(self, worker_id: str) -> None:
        """Drop the state of a retired worker."""
        self._forget(lambda other: other == worker_id)

    def _forget(self, is_gone: Callable[[str], bool]) -> None:
        for state in self._worker_states:
            state.forget(is_gone)
