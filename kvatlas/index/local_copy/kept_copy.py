"""A router's copy of the index that is kept in a file, so that it is warm after a restart.

It answers and changes in memory, like any copy. Now and then, changes are written in the background: one transaction brings the
file to the state after one message of the stream, and records that position. A copy that continues from the file reads the
stream from there. If there are too many changes for one transaction, as there are when a copy is made, they are written in
parts; until the last part is written, the file has no position and is not used.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from kvatlas.bus.partition_batch import Position
from kvatlas.bus.queue import EVERY_PARTITION
from kvatlas.index.sqlite.file import Changes, IndexFile
from kvatlas.index.sqlite.index import SqliteIndex
from kvatlas.runtime.threads import finish_in_thread

VALUES_A_PART = 2_000
"""How many changed values of each kind and shard are described before other tasks get their turn: a few milliseconds of
work."""


class KeptCopy(SqliteIndex):
    """An index whose changes return immediately; `save` writes them to the file."""

    def __init__(self, file: IndexFile) -> None:
        """Reads the whole file. Raises DamagedFile."""
        super().__init__(file, side_index=False)
        self.resumed = False
        """True if the copy continues from the content of the file."""

    @property
    def kept_position(self) -> Position | None:
        """The position after which the copy in the file needs the stream's messages; None if the file does not hold a whole
        copy."""
        return self._tracked_shards[0].positions.get(EVERY_PARTITION)

    async def save(self, position: Callable[[], Position]) -> None:
        """Write this copy to the file. `position`: the copy's position in the stream. Raises Unreachable; what is left is then
        written the next time."""
        async with self._writing:
            while any(len(one) > VALUES_A_PART for shard in self._tracked_shards for one in shard.changed_values):
                await self._write_part()
            self._tracked_shards[0].positions[EVERY_PARTITION] = position()
            await self._write_changes_alone(self._tracked_shards)

    async def _write_part(self) -> None:
        changes, shards = Changes(), self._tracked_shards
        changes.put("positions", (0, EVERY_PARTITION), None)
        for shard in shards:
            shard.describe_values(changes, VALUES_A_PART)
        changed = [one for shard in shards for one in shard.changed_values]
        taken = [dict.fromkeys(islice(one, VALUES_A_PART)) for one in changed]
        for one, keys in zip(changed, taken, strict=True):
            for key in keys:
                del one[key]
        try:
            await finish_in_thread(self._file.write, changes)
        except BaseException:
            for one, keys in zip(changed, taken, strict=True):
                one.update(keys)
            raise
        for shard in shards:
            shard.confirm()

    async def _save(self, shard: int, workers: Iterable[str] = ()) -> None:
        self._tracked_shards[shard].changed_workers.update(dict.fromkeys(workers))

    async def _save_all(self) -> None:
        for shard in self._tracked_shards:
            shard.changed_workers.update(dict.fromkeys(shard.workers))
