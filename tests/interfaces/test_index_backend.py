"""A residency index fulfils its interface, in each implementation in this process, and after a restart."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.sqlite.index import open_sqlite_index

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
USE = ScopeUse(SCOPE, 4, 1_000)
CHAIN = extend_chain(range(12), 4)
FIRST, SECOND, THIRD = unpack_hashes(CHAIN)


@pytest.fixture(params=["memory", "sqlite"])
async def index(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ResidencyIndex]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    async with open_sqlite_index(tmp_path / "index") as opened:
        yield opened


async def test_a_pin_is_as_it_was_put_by_tier_until_it_is_put_otherwise(index: ResidencyIndex) -> None:
    await index.put(USE, "w", Tier.HBM, CHAIN, pinned=True)
    await index.put(USE, "w", Tier.CPU_DRAM, CHAIN)
    assert [(one.tier, one.pinned) for one in await index.locate(SCOPE, SECOND)] == [
        *((Tier.HBM, True), (Tier.CPU_DRAM, False)),
    ]
    await index.put(USE, "w", Tier.HBM, CHAIN[8:16])
    assert [one.pinned for one in await index.locate(SCOPE, SECOND)] == [False, False]
    assert [one.pinned for one in await index.locate(SCOPE, FIRST)] == [True, False]


async def test_put_replaces_and_removal_and_clears_are_as_asked(index: ResidencyIndex) -> None:
    for _ in range(2):
        await index.put(USE, "w", Tier.HBM, CHAIN)
    await index.put(USE, "v", Tier.HBM, CHAIN[:8])
    assert await index.length() == 4 and (await index.metrics()).resident_bytes == 4_000
    assert [one.worker_id for one in await index.children(SCOPE, None)] == ["v", "w"]
    assert [one.sequence_hash for one in await index.children(SCOPE, FIRST)] == [SECOND]
    assert await index.remove(SCOPE, "w", None, CHAIN[16:]) == 1 and await index.locate(SCOPE, THIRD) == []
    await index.clear_worker("w")
    assert {one.worker_id async for one in index.snapshot()} == {"v"}
    await index.clear()
    assert await index.is_empty()


async def test_counters_survive_a_clear_and_bytes_are_the_backing_stores(index: ResidencyIndex) -> None:
    await index.put(USE, "w", Tier.HBM, CHAIN)
    await index.remove(SCOPE, "w", Tier.HBM, CHAIN[16:])
    await index.children(SCOPE, FIRST)
    await index.clear()
    work = index.work
    assert (work.puts, work.removes, work.prefix_scans) == (3, 1, 1)
    assert work.bytes_written > 4_096 if index.persistent else work.bytes_written == 0


async def test_bytes_written_are_what_the_file_system_was_given(tmp_path: Path) -> None:
    path = tmp_path / "index"
    async with open_sqlite_index(path) as index:
        await index.put(USE, "w", Tier.HBM, CHAIN)
        log = Path(f"{path}-wal").stat().st_size
        assert 0 < index.work.bytes_written <= log
        for first in range(40):  # until the log is copied into the database
            await index.put(USE, f"w{first}", Tier.HBM, extend_chain(range(first, first + 40_000), 4))
        assert index.work.bytes_written > path.stat().st_size > log


async def test_a_persistent_index_is_what_it_was(tmp_path: Path) -> None:
    async with open_sqlite_index(tmp_path / "index") as index:
        assert index.persistent and not MemoryIndex().persistent
        await index.put(USE, "w", Tier.HBM, CHAIN, pinned=True)
    async with open_sqlite_index(tmp_path / "index") as index:
        assert [(one.sequence_hash, one.pinned) for one in await index.locate(SCOPE, THIRD)] == [(THIRD, True)]
