"""A replica that keeps its copy in a file is warm after a restart, and never harmed by an unusable file."""

import logging
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvatlas.errors import Unreachable
from kvatlas.index.local_copy import kept_copy
from kvatlas.index.local_copy.kept_copy import KeptCopy
from kvatlas.index.local_copy.local_copy import IndexReplica, open_replica
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.index.redis.answering_index import AnsweringIndex
from kvatlas.index.sqlite.index import open_sqlite_index
from kvatlas.store.connection import connected_store
from tests.eventually import until
from tests.kvatlas.index.local_copy.test_local_copy import CHAIN, KEYS, SCOPE, World, world

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _frequent_saves_in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.index.local_copy.local_copy.CHECK_S", 0.1)
    monkeypatch.setattr(kept_copy, "VALUES_A_PART", 16)


@asynccontextmanager
async def kept(here: World, file: Path) -> AsyncIterator[IndexReplica]:
    """The world's replica, with this file."""
    async with connected_store(here.valkey.url, wait=False) as store:
        settings = ReplicaSettings(here.nats.url, max_stale_ms=5_000, file=file)
        async with open_replica(store, AnsweringIndex(store, here.index), settings) as replica:
            here.replica = replica
            await here.becomes_exact()
            yield replica


async def saved(replica: IndexReplica) -> None:
    """Wait until the file has the replica's current state."""
    before = replica.counters.saves
    await until(lambda: replica.counters.saves > before + 1, what="the copy is saved")


def loads(replica: IndexReplica) -> tuple[int, int]:
    """(copies made from the store, copies continued from the file)."""
    return replica.counters.loads, replica.counters.resumed


async def test_a_copy_is_warm_after_a_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, killed = tmp_path / "copy", tmp_path / "killed"
    caplog.set_level(logging.INFO, "kvatlas.replica")
    async with world() as here:
        plain, hybrid = here.workers
        await here.becomes_exact()
        in_memory_bytes = here.replica.memory_bytes
        async with kept(here, file) as replica:
            assert loads(replica) == (1, 0)
            assert replica.memory_bytes > 1.4 * in_memory_bytes  # it includes the rows, too
            await saved(replica)
            for end in ("", "-wal"):  # as left by a killed process
                shutil.copy(f"{file}{end}", f"{killed}{end}")
            await plain.send(plain.remove(SCOPE, CHAIN[8 * 60 : 8 * 70]))
            await here.becomes_exact()
            async with kept(here, file) as other:  # two processes, one file
                assert loads(other) == (1, 0) and "another process has it open" in caplog.text
        await hybrid.send(hybrid.mark(SCOPE, [KEYS[66]], unmark=True))  # while it is away
        await here.index.retire("plain", plain.incarnation)
        for one in (file, killed):
            async with kept(here, one) as replica:
                assert loads(replica) == (0, 1)
                await plain.send(plain.store(SCOPE, CHAIN[8 * 60 : 8 * 65], parent=KEYS[59]))
                await here.becomes_exact()
                await plain.send(plain.remove(SCOPE, CHAIN[8 * 60 : 8 * 65]))
                await here.becomes_exact()
            assert replica.counters.mismatches == 0 and "resuming the copy in" in caplog.text


async def test_a_file_that_is_of_no_use_is_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text, database, old, foreign, cut = (tmp_path / name for name in ("text", "database", "old", "foreign", "cut"))
    text.write_text("no database at all\n" * 400)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    async with open_sqlite_index(old), open_sqlite_index(foreign, partitions=8):
        pass
    with sqlite3.connect(old) as connection:
        connection.execute("PRAGMA user_version = 1")
    connection.close()
    async with world() as here:
        for file, why in (
            (text, "it is not an index file, or is damaged"),
            (database, "another program's database"),
            (old, "version 1; this kvatlas expects 3"),
            (foreign, "laid out with 8 partitions"),
        ):
            async with kept(here, file) as replica:
                assert loads(replica) == (1, 0)
                assert f"{file.name}: {why}" in caplog.text and f"renamed it to {file}.refused" in caplog.text
                await saved(replica)
            assert Path(f"{file}.refused").exists()
        with sqlite3.connect(f"{database}.refused") as connection:
            assert connection.execute("SELECT count(*) FROM other").fetchone() == (0,)
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        connection.close()
        async with kept(here, text) as replica:
            assert loads(replica) == (0, 1)
        shutil.copy(text, cut)
        with sqlite3.connect(cut) as connection:  # as left by a process that was killed between two parts
            connection.execute("DELETE FROM positions")
        connection.close()
        async with kept(here, cut) as replica:
            assert loads(replica) == (1, 0) and "cut can't be resumed (it has no whole copy)" in caplog.text
        with sqlite3.connect(cut) as connection:  # the stream dropped what it missed
            connection.execute("UPDATE positions SET seq = seq + 1000")
        connection.close()
        async with kept(here, cut) as replica:
            assert loads(replica) == (1, 0) and "the stream begins at 1 and ends at" in caplog.text
        with sqlite3.connect(cut) as connection:  # another fleet's
            connection.execute("UPDATE positions SET creation_us = 1")
        connection.close()
        async with kept(here, cut) as replica:
            assert loads(replica) == (1, 0) and "it is of another stream" in caplog.text


async def test_a_full_disk_stops_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world() as here, kept(here, tmp_path / "copy") as replica:
        plain, _ = here.workers

        async def refuse(*_: object) -> None:
            raise Unreachable("index file copy: can't be written (database or disk is full); changes wait in memory")

        with monkeypatch.context() as full:
            full.setattr(KeptCopy, "_write_part", refuse)
            await plain.send(plain.store(SCOPE, CHAIN[8 * 70 :], parent=KEYS[69]))
            await here.becomes_exact()
            await until(lambda: replica.counters.save_failures, what="a save fails")
            assert (await replica.overlap(SCOPE, CHAIN)).source.startswith("replica")
        await saved(replica)
        assert replica.counters.losses == 0
    assert (tmp_path / "copy").exists()
