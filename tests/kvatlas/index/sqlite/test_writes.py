"""A call writes the rows that it changed to the file, and no others."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.subjects import partition_of
from kvatlas.identity import Scope
from kvatlas.index.sqlite.index import SqliteIndex, open_sqlite_index
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
WORKERS = ("a", "b", "c")
CHAIN = extend_chain(range(4 * 12), 4)


@pytest.fixture
async def index(tmp_path: Path) -> AsyncIterator[SqliteIndex]:
    """An index of three workers, each in its own partition."""
    assert len({partition_of(worker_id, 64) for worker_id in WORKERS}) == 3
    async with open_sqlite_index(tmp_path / "index") as index:
        for worker_id in WORKERS:
            source = MessageSource(worker_id)
            await apply_messages(index, source.begin(1), source.store(SCOPE, CHAIN))
        yield index


def rows_written(index: SqliteIndex) -> int:
    """Rows written since the file was opened."""
    return index._file._connection.total_changes


async def test_a_scrub_that_finds_no_damage_writes_nothing(index: SqliteIndex) -> None:
    before = rows_written(index)
    assert (await index.scrub(0, 1 << 20)).checked == len(WORKERS)
    assert rows_written(index) == before


async def test_a_scrub_writes_the_damaged_workers(index: SqliteIndex) -> None:
    shard = index._tracked_shards[0]
    shard.table.holders[shard.workers["b"].active].digest.add(SCOPE.scope_id, Tier.HBM, CHAIN[:8])
    before = rows_written(index)
    assert (await index.scrub(0, 1 << 20)).damaged == ["b"]
    assert rows_written(index) == before + 2  # its record, and its holder


async def test_a_replaced_position_writes_the_workers_of_its_partition(index: SqliteIndex) -> None:
    partition = partition_of("b", 64)
    await index.set_position(partition, None, Position(1, 5))
    before = rows_written(index)
    await index.set_position(partition, Position(1, 5), Position(2, 0))
    assert rows_written(index) == before + 3  # the position, the worker's record, and its holder
    record = await index.record("b")
    assert record is not None and record.bad


async def test_a_first_position_writes_no_worker_and_a_refused_one_nothing(index: SqliteIndex) -> None:
    partition = partition_of("b", 64)
    before = rows_written(index)
    assert await index.set_position(partition, None, Position(1, 5)) == Position(1, 5)
    assert rows_written(index) == before + 1
    assert await index.set_position(partition, Position(1, 4), Position(2, 0)) == Position(1, 5)
    assert rows_written(index) == before + 1
