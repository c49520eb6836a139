"""Files that can't be used, and writes that fail: one clear line each, and nothing lost."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import LayoutMismatch, Unreachable, UnsuitableStore
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.sqlite.index import open_sqlite_index

pytestmark = pytest.mark.anyio

USE = ScopeUse(Scope("model", "tokenizer"), 4)


async def test_a_file_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    text, database = tmp_path / "text", tmp_path / "database"
    text.write_text("no database at all, but long enough to be looked at\n" * 40)
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    for path, line in ((text, "not an index file, or is damaged"), (database, "another program's database")):
        with pytest.raises(UnsuitableStore, match=line):
            async with open_sqlite_index(path):
                pass
    assert text.read_text().startswith("no database")


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsuitableStore, match="missing/index: it can't be opened"):
        async with open_sqlite_index(tmp_path / "missing" / "index"):
            pass


async def test_a_file_that_is_open_is_refused_a_second_time(tmp_path: Path) -> None:
    async with open_sqlite_index(tmp_path / "index"):
        with pytest.raises(UnsuitableStore, match="another process has it open"):
            async with open_sqlite_index(tmp_path / "index"):
                pass


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


async def test_another_version_or_layout_is_refused(tmp_path: Path) -> None:
    async with open_sqlite_index(tmp_path / "index", partitions=8):
        pass
    with pytest.raises(LayoutMismatch, match="laid out with 8 partitions and 1 shards; asked for 16 and 1"):
        async with open_sqlite_index(tmp_path / "index", partitions=16):
            pass
    set_version(tmp_path / "index", 99)
    with pytest.raises(LayoutMismatch, match="version 99; this kvatlas expects 3"):
        async with open_sqlite_index(tmp_path / "index"):
            pass


@pytest.mark.parametrize("table", ["workers", "holders"])
async def test_a_row_that_can_not_be_read_is_named(tmp_path: Path, table: str) -> None:
    async with open_sqlite_index(tmp_path / "index") as index:
        await index.put(USE, "w", Tier.HBM, extend_chain(range(8), 4))
    with sqlite3.connect(tmp_path / "index") as connection:
        connection.execute(f"UPDATE {table} SET packed = x'c1'")  # noqa: S608
    connection.close()
    with pytest.raises(UnsuitableStore, match=r"can't be read .*delete it; publishers' snapshots fill a new one"):
        async with open_sqlite_index(tmp_path / "index"):
            pass


async def test_a_removal_that_could_not_be_written_leaves_no_row_behind(tmp_path: Path) -> None:
    chain = extend_chain(range(40), 4)
    async with open_sqlite_index(tmp_path / "index") as index:
        await index.put(USE, "w", Tier.HBM, chain)
        index._file._connection.execute("PRAGMA query_only = ON")
        with pytest.raises(Unreachable, match="can't be written"):
            await index.remove(USE.scope, "w", Tier.HBM, chain[-8:])
        index._file._connection.execute("PRAGMA query_only = OFF")
        await index.put(USE, "w", Tier.HBM, chain[-8:])
        await index.remove(USE.scope, "w", Tier.HBM, chain[-8:])
        await index.put(USE, "w", Tier.HBM, chain[-8:])
        await index.remove(USE.scope, "w", Tier.HBM, chain[-8:])
    async with open_sqlite_index(tmp_path / "index") as index:
        assert await index.length() == 9
        assert (await index.scrub(0, 1 << 20)).damaged == []


async def test_what_a_full_disk_refused_is_written_with_the_next_change(tmp_path: Path) -> None:
    chain = extend_chain(range(4 * 2_000), 4)
    async with open_sqlite_index(tmp_path / "index") as index:
        await index.put(USE, "w", Tier.HBM, chain[:80])
        connection = index._file._connection
        [pages] = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(Unreachable, match=r"index: can't be written \(database or disk is full\)"):
            await index.put(USE, "w", Tier.HBM, chain)
        assert await index.length() == 2_000
        connection.execute("PRAGMA max_page_count = 1000000")
        await index.remove(USE.scope, "w", Tier.HBM, chain[-8:])
    async with open_sqlite_index(tmp_path / "index") as index:
        assert await index.length() == 1_999
        assert (await index.scrub(0, 1 << 20)).damaged == []
