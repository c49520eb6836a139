"""A shard of many workers: reading or changing all of them takes several calls."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvatlas.blocks.hashing import pack_hashes
from kvatlas.bus.partition_batch import Position
from kvatlas.identity import Scope
from kvatlas.index.redis import index as redis_index
from kvatlas.index.redis import shard_reader
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.lookup import holder_names
from kvatlas.index.redis.records import pack_position, unpack_position
from kvatlas.store.connection import Store, open_store
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "t")
BLOCK = pack_hashes([1])
WORKERS = [f"w{number}" for number in range(60)]
K = ShardKeys(0)


@pytest.fixture
async def store(fresh_store: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    for module, name in (
        (holder_names, "HOLDERS_A_CALL"),
        (redis_index, "RECORDS_A_CALL"),
        (shard_reader, "SCAN_COUNT"),
    ):
        monkeypatch.setattr(module, name, 7)
    opened = await open_store(fresh_store, wait=False)
    before = await opened.client.config_get("hash-max-listpack-entries")
    await opened.client.config_set("hash-max-listpack-entries", 4)  # or a HASH of so few is read at once
    try:
        yield opened
    finally:
        await opened.client.config_set("hash-max-listpack-entries", before["hash-max-listpack-entries"])
        await opened.close()


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    opened = await open_redis_index(store, partitions=2, shards=1, writer=True)
    for worker in WORKERS:
        source = MessageSource(worker)
        await apply_messages(opened, source.begin(1), source.store(SCOPE, BLOCK))
    return opened


async def workers_of(index: RedisIndex) -> list[str]:
    return sorted((await index.overlap(SCOPE, BLOCK)).depths())


async def test_every_worker_is_read(index: RedisIndex) -> None:
    assert sorted(record.worker_id for record in await index.records(0)) == sorted(WORKERS)
    assert await workers_of(index) == sorted(WORKERS)
    assert await index.length() == len(WORKERS)


async def test_a_retired_worker_is_in_no_answer_of_a_client_that_has_its_name(index: RedisIndex, store: Store) -> None:
    reader = await open_redis_index(store, writer=False)
    assert await workers_of(reader) == sorted(WORKERS)
    await index.retire("w7", 1)
    assert await workers_of(reader) == sorted(set(WORKERS) - {"w7"})


async def test_names_that_change_while_they_are_read_are_no_version(
    index: RedisIndex, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer has the workers that were active all the time, and no others."""
    reader = await open_redis_index(store, writer=False)
    assert await workers_of(reader) == sorted(WORKERS)
    gone: list[str] = []
    call_ro = reader._functions.call_ro

    async def changing(function: str, *what: Any) -> Any:
        answer = await call_ro(function, *what)
        if function == "kvatlas_active":
            gone.append(WORKERS[len(gone)])
            await index.retire(gone[-1], 1)
        return answer

    monkeypatch.setattr(reader._functions, "call_ro", changing)
    await index.retire("w59", 1)
    found = await workers_of(reader)
    assert len(gone) > 3
    assert set(WORKERS) - {"w59", *gone} <= set(found) <= set(WORKERS) - {"w59"}
    monkeypatch.undo()
    assert await workers_of(reader) == sorted(set(WORKERS) - {"w59", *gone})


async def test_a_position_is_replaced_when_all_its_workers_are_bad(
    index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Position(1, 1), Position(2, 0)
    await index.set_position(0, None, first)
    call, between = index._functions.call, []

    async def watched(function: str, *what: Any) -> Any:
        between.append(await index.position(0))
        return await call(function, *what)

    monkeypatch.setattr(index._functions, "call", watched)
    assert await index.set_position(0, first, second) == second
    assert len(between) > 3 and set(between) == {first}
    records = await index.records(0)
    assert {record.partition for record in records} == {0, 1}
    assert all(record.bad == (record.partition == 0) for record in records)


async def test_a_position_that_another_owner_moved_is_not_replaced(
    index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = Position(1, 1), Position(2, 0), Position(3, 0)
    await index.set_position(0, None, first)
    call, calls = index._functions.call, 0

    async def raced(function: str, *what: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            monkeypatch.undo()
            assert await index.set_position(0, first, third) == third
        return await call(function, *what)

    monkeypatch.setattr(index._functions, "call", raced)
    assert await index.set_position(0, first, second) == third
    assert await index.position(0) == third


async def test_a_position_is_replaced_from_the_start_again_on_another_server(index: RedisIndex) -> None:
    first, second = Position(1, 1), Position(2, 0)
    await index.set_position(0, None, first)
    args = [0, pack_position(first), pack_position(second), b"another server", None, 1_000]
    for cursor in (1, 5, 7):  # somewhere in the middle, by the other server's order
        args[4] = cursor
        stored, _, _ = await index._functions.call("kvatlas_set_position", [K.partitions, K.workers], args)
        assert unpack_position(stored) == second
        assert all(record.bad == (record.partition == 0) for record in await index.records(0))
        first, second = second, Position(second.creation_us + 1, 0)
        args[1:3] = [pack_position(first), pack_position(second)]
        for source in [MessageSource(worker) for worker in WORKERS]:
            await apply_messages(index, source.begin(cursor + 1))
