"""The file that keeps a router's copy of the index: opening, resuming, writing and dropping it.

A copy never depends on its file: a file that is not a copy is renamed, a file that can't be opened is left alone, and a file
that is older than the stream is emptied. In each case, one line is logged, and the copy is made from the store, as if there
were no file.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from nats.aio.client import Client

from kvatlas.bus.partition_batch import Position
from kvatlas.bus.stream import stream_info
from kvatlas.errors import LayoutMismatch, Unreachable, UnsuitableStore
from kvatlas.index.local_copy.counters import ReplicaCounters
from kvatlas.index.local_copy.kept_copy import KeptCopy
from kvatlas.index.local_copy.stream_feed import StreamFeed
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.layout import Layout
from kvatlas.index.sqlite.file import DamagedFile, IndexFile
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.threads import finish_in_thread

REFUSED_SUFFIX = ".refused"
_PARTS = ("-wal", "-shm", "")
"""Suffixes of a database's file names."""

log = logging.getLogger("kvatlas.replica")
_rare_log = RateLimitedLog(log)


class CopyFile:
    """The file of one replica. Without a file (`path=None`), copies are MemoryIndexes, which are not kept."""

    def __init__(self, path: Path | None, counters: ReplicaCounters) -> None:
        self._path = path
        self._counters = counters

    @asynccontextmanager
    async def open(self, layout: Layout) -> AsyncIterator[MemoryIndex]:
        """Open the copy in the file if it matches a store of this layout, otherwise an empty copy."""
        opened = None
        if self._path is not None:
            try:
                opened = await finish_in_thread(_open, self._path, layout)
            except UnsuitableStore as error:
                _rare_log.report("open", f"replica: {error}; the copy is not kept in a file")
        if opened is None:
            yield MemoryIndex(layout.partitions, layout.shards, side_index=False)
            return
        file, copy = opened
        try:
            yield copy
        finally:
            await finish_in_thread(file.close)

    async def resume(self, copy: MemoryIndex, client: Client) -> Position | None:
        """The position after which a copy from the file needs the stream's messages. If the stream no longer holds what the
        copy has missed, the copy is emptied, and None is returned. Raises KvatlasError or a nats error."""
        if not isinstance(copy, KeptCopy):
            return None
        position, stream = copy.kept_position, await stream_info(client)
        if position is None:
            why = "" if await copy.is_empty() else "it has no whole copy"
        elif position.creation_us != stream.creation_us:
            why = "it is of another stream"
        elif not stream.first_seq <= position.seq + 1 <= stream.last_seq + 1:
            why = f"the stream begins at {stream.first_seq} and ends at {stream.last_seq}, the copy at {position.seq}"
        else:
            copy.resumed = True
            log.info("replica: resuming the copy in %s at position %d", self._path, position.seq)
            return position
        if why:
            log.warning("replica: the copy in %s can't be resumed (%s); making a new one", self._path, why)
        await copy.clear()
        return None

    @staticmethod
    def is_resumed(copy: MemoryIndex) -> bool:
        """True if the copy continues from the content of the file."""
        return isinstance(copy, KeptCopy) and copy.resumed

    async def save(self, copy: MemoryIndex, feed: StreamFeed) -> None:
        """Write what has changed since the last time."""
        if not isinstance(copy, KeptCopy):
            return
        try:
            await copy.save(lambda: feed.position)
        except Unreachable as error:
            self._counters.save_failures += 1
            _rare_log.report("save", f"replica: {error}")
        else:
            self._counters.saves += 1

    @staticmethod
    async def forget(copy: MemoryIndex) -> None:
        """Forget the copy, because it was wrong and must not be resumed."""
        if not isinstance(copy, KeptCopy):
            return
        try:
            await copy.clear()
        except Unreachable as error:
            log.warning("replica: %s", error)


def _open(path: Path, layout: Layout) -> tuple[IndexFile, KeptCopy]:
    """Open the file. Raises UnsuitableStore if it can't be opened, or if another process has it open."""
    try:
        return _read(path, layout)
    except (DamagedFile, LayoutMismatch) as error:
        refused = path.with_name(path.name + REFUSED_SUFFIX)
        seen = error.seen if isinstance(error, DamagedFile) else error
        log.warning("replica: %s; renamed it to %s and started a new file", seen, refused)
        try:
            for end in _PARTS:
                if (part := Path(f"{path}{end}")).exists():
                    part.replace(f"{refused}{end}")
        except OSError as failure:
            raise UnsuitableStore(f"index file {path}: it can't be renamed ({failure})") from error
    return _read(path, layout)


def _read(path: Path, layout: Layout) -> tuple[IndexFile, KeptCopy]:
    file = IndexFile(path, layout.partitions, layout.shards)
    try:
        return file, KeptCopy(file)
    except BaseException:
        file.close()
        raise
