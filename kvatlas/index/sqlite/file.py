"""The file of a SqliteIndex: its tables, and the rows that a transaction writes.

The write-ahead log makes each transaction whole or absent, however the process ends. It is synced to disk only at checkpoints,
so a machine that loses power may lose the last transactions. Positions go back along with them, as in a store that has lost
writes.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import msgpack

from kvatlas.errors import DATA_ERRORS, KvatlasError, LayoutMismatch, Unreachable, UnsuitableStore
from kvatlas.index.protocol import DEFAULT_PARTITIONS, DEFAULT_SHARDS

APPLICATION_ID = 0x6B766174
VERSION = 3

_TABLES = {
    "layout": ("id INTEGER", "partitions INTEGER, shards INTEGER"),
    "scopes": ("scope BLOB", "text BLOB"),
    "blocks": ("shard INTEGER, id INTEGER", "scope BLOB, hash BLOB, holders BLOB, parent BLOB"),
    "marks": ("shard INTEGER, id INTEGER", "scope BLOB, hash BLOB, holders BLOB"),
    "heads": ("shard INTEGER, id INTEGER", "scope BLOB, hash BLOB, holders BLOB"),
    "pinned": ("shard INTEGER, number INTEGER, scope BLOB, hash BLOB", "tiers INTEGER"),
    "holders": ("shard INTEGER, number INTEGER", "packed BLOB"),
    "workers": ("shard INTEGER, worker TEXT", "packed BLOB"),
    "positions": ("shard INTEGER, partition INTEGER", "creation_us INTEGER, seq INTEGER"),
    "numbers": ("shard INTEGER", "last INTEGER"),
}
"""The columns that identify a row, then the other columns. Values of holders, marks and heads are those of the memory index."""


@dataclass(frozen=True, slots=True)
class _Statements:
    """The SQL statements for one table."""

    create: str
    select: str
    select_shard: str
    insert: str
    delete: str
    empty: str

    @classmethod
    def of(cls, table: str, keys: str, others: str) -> Self:
        names = [column.split()[0] for column in keys.split(", ")]
        marks = ", ".join("?" * len(f"{keys}, {others}".split(", ")))
        return cls(
            f"CREATE TABLE {table} ({keys}, {others}, PRIMARY KEY ({', '.join(names)})) WITHOUT ROWID",
            f"SELECT * FROM {table}",  # noqa: S608  # # noqa: S608  # the names are those above
            f"SELECT * FROM {table} WHERE shard = ?",  # noqa: S608
            f"INSERT OR REPLACE INTO {table} VALUES ({marks})",  # noqa: S608
            f"DELETE FROM {table} WHERE {' AND '.join(f'{name} = ?' for name in names)}",  # noqa: S608
            f"DELETE FROM {table}",  # noqa: S608
        )


_SAY = {table: _Statements.of(table, keys, others) for table, (keys, others) in _TABLES.items()}

CHECKPOINT_BYTES = 4 << 20
"""When the log reaches this size, it is copied into the database."""
_LOG_HEADER_BYTES, _FRAME_HEADER_BYTES = 32, 24
"""Header sizes of SQLite's write-ahead log and of each page in it. A page's header begins with its number, in 4 bytes."""

Row = tuple[Any, ...]
T = TypeVar("T")
_REPLACE = "delete it; publishers' snapshots fill a new one"


@dataclass(slots=True)
class Changes:
    """The rows that a transaction sets, and the keys of the rows that it deletes, by table."""

    set: dict[str, list[Row]] = field(default_factory=dict)
    deleted: dict[str, list[Row]] = field(default_factory=dict)

    def put(self, table: str, key: Row, values: Row | None) -> None:
        """Set a row; None deletes it."""
        if values is None:
            self.deleted.setdefault(table, []).append(key)
        else:
            self.set.setdefault(table, []).append((*key, *values))

    def __bool__(self) -> bool:
        return bool(self.set or self.deleted)


class DamagedFile(UnsuitableStore):
    """The content of the file can't be read: it is damaged, or belongs to a different program. `seen`: the message without the
    cure."""

    def __init__(self, path: Path, what: str, cure: str = _REPLACE) -> None:
        self.seen = f"index file {path}: {what}"
        super().__init__(f"{self.seen}; {cure}")


class IndexFile:
    """The file may be open in one process at a time. Calls may come from any thread, but only one after another."""

    def __init__(self, path: Path, partitions: int | None, shards: int | None) -> None:
        """Opens the file, or creates it. Raises DamagedFile (the file is not ours, or is damaged), UnsuitableStore (it is open
        elsewhere, or can't be opened) or LayoutMismatch."""
        self.path = path
        self.bytes_written = 0
        """Number of bytes given to the file system since the file was opened: the log, and the pages copied from it into the
        database."""
        self._log = Path(f"{path}-wal")
        self._log_bytes = 0
        with self._opening():
            self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
            try:
                self._prepare()
                self.partitions, self.shards = self._layout(partitions, shards)
            except BaseException:
                self._connection.close()
                raise

    def rows(self, table: str) -> Iterator[Row]:
        """Every row, with its fields in the order of the table. Raises DamagedFile."""
        with self._opening():
            yield from self._connection.execute(_SAY[table].select)

    def shard_rows(self, table: str, shard: int) -> Iterator[Row]:
        """The rows of one shard, without the shard number."""
        with self._opening():
            for row in self._connection.execute(_SAY[table].select_shard, (shard,)):
                yield row[1:]

    def read(self, what: str, unpack: Callable[..., T], *fields: Any) -> T:
        """Unpack a row's fields. Raises DamagedFile if they can't be read."""
        try:
            return unpack(*fields)
        except (*DATA_ERRORS, KvatlasError, msgpack.UnpackException) as error:
            raise DamagedFile(self.path, f"a {what} can't be read ({error})") from error

    def write(self, changes: Changes) -> None:
        """Write all changes in one transaction. Raises Unreachable if nothing was written."""
        try:
            with self._transaction():
                for table, rows in changes.set.items():
                    self._connection.executemany(_SAY[table].insert, rows)
                for table, keys in changes.deleted.items():
                    self._connection.executemany(_SAY[table].delete, keys)
            self._follow_log()
        except sqlite3.Error as error:
            raise Unreachable(f"index file {self.path}: can't be written ({error}); changes wait in memory") from error

    def clear(self) -> None:
        """Delete every row. Raises Unreachable."""
        try:
            with self._transaction():
                for table in _TABLES.keys() - {"layout"}:
                    self._connection.execute(_SAY[table].empty)
            self._follow_log()
        except sqlite3.Error as error:
            raise Unreachable(f"index file {self.path}: can't be emptied ({error})") from error

    def close(self) -> None:
        self._connection.close()

    def _follow_log(self) -> None:
        """Count how much the log has grown, and copy it into the database if it is long."""
        try:
            log_bytes = self._log.stat().st_size
            self.bytes_written += log_bytes - self._log_bytes
            self._log_bytes = log_bytes
            if log_bytes >= CHECKPOINT_BYTES:
                pages = self._count_logged_pages()
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                self.bytes_written += pages * self._page_bytes
                self._log_bytes = self._log.stat().st_size
        except OSError as error:
            raise Unreachable(f"index file {self.path}: its log can't be read ({error})") from error

    def _count_logged_pages(self) -> int:
        """The number of different pages in the log."""
        frame_bytes = _FRAME_HEADER_BYTES + self._page_bytes
        with self._log.open("rb") as log:
            starts = range(_LOG_HEADER_BYTES, self._log_bytes, frame_bytes)
            return len({os.pread(log.fileno(), 4, start) for start in starts})

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
                line = "another process has it open; stop that one, or choose another file"
            elif error.sqlite_errorcode in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise DamagedFile(self.path, f"it is not an index file, or is damaged ({error})") from error
            else:
                line = f"it can't be opened ({error})"
            raise UnsuitableStore(f"index file {self.path}: {line}") from error

    def _prepare(self) -> None:
        execute = self._connection.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")
        [application] = execute("PRAGMA application_id").fetchone()
        [version] = execute("PRAGMA user_version").fetchone()
        [tables] = execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if tables and application != APPLICATION_ID:
            raise DamagedFile(self.path, "another program's database", "choose another file")
        if tables and version != VERSION:
            raise LayoutMismatch(f"index file {self.path}: version {version}; this kvatlas expects {VERSION}")
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("PRAGMA wal_autocheckpoint = 0")  # `_follow_log` does this
        [self._page_bytes] = execute("PRAGMA page_size").fetchone()
        if not tables:
            with self._transaction():
                for statements in _SAY.values():
                    execute(statements.create)
                execute(f"PRAGMA application_id = {APPLICATION_ID}")
                execute(f"PRAGMA user_version = {VERSION}")

    def _layout(self, partitions: int | None, shards: int | None) -> tuple[int, int]:
        wanted = partitions or DEFAULT_PARTITIONS, shards or DEFAULT_SHARDS
        found = self._connection.execute("SELECT partitions, shards FROM layout").fetchone()
        if found is None:
            if wanted[0] % wanted[1]:
                raise LayoutMismatch(f"{wanted[1]} shards; expected a divisor of {wanted[0]} partitions")
            self._connection.execute(_SAY["layout"].insert, (0, *wanted))
            return wanted
        if (partitions or found[0], shards or found[1]) != found:
            raise LayoutMismatch(
                f"index file {self.path}: laid out with {found[0]} partitions and {found[1]} shards; "
                f"asked for {wanted[0]} and {wanted[1]}"
            )
        return found[0], found[1]
