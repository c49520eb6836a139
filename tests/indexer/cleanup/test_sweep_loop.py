import anyio
import pytest

from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_indexer.cleanup.sweep_loop import Sweeper
from kvatlas_indexer.counters import IndexerCounters
from tests.eventually import until
from tests.indexer.idle_readers import owned_partitions
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")


async def blocks_left(store: Store) -> int:
    keys = [key async for key in store.client.scan_iter("kva:*:blocks:*")]
    return sum([await store.client.hlen(key) for key in keys])


async def test_entries_of_retired_holders_are_removed_from_the_store(store: Store) -> None:
    index = await open_redis_index(store, partitions=64, shards=2, writer=True)
    workers = [MessageSource(f"w{i}") for i in range(6)]  # of both shards
    for number, worker in enumerate(workers):
        hashes = b"".join((number << 32 | i).to_bytes(8, "little") for i in range(3_000))
        await apply_messages(index, worker.begin(1), worker.store(SCOPE, hashes))
        await apply_messages(index, worker.clear())
    assert await blocks_left(store) == 18_000
    async with owned_partitions(0, 1) as owned, anyio.create_task_group() as group:
        sweeper = Sweeper(index, IndexerCounters(), owned)
        group.start_soon(sweeper.run)

        async def empty() -> bool:
            return await blocks_left(store) == 0 and sweeper.left == {0: 0, 1: 0}

        await until(empty, what="every entry is swept")
        group.cancel_scope.cancel()


async def test_only_shards_whose_partition_is_owned_are_swept(store: Store) -> None:
    index = await open_redis_index(store, partitions=64, shards=2, writer=True)
    async with owned_partitions(1, 5, 7) as owned, anyio.create_task_group() as group:
        sweeper = Sweeper(index, IndexerCounters(), owned)
        group.start_soon(sweeper.run)
        await until(lambda: sweeper.left, what="it has swept once")
        assert list(sweeper.left) == [1]
        group.cancel_scope.cancel()
