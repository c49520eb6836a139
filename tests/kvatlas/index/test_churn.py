"""What the store keeps of thousands of short-lived workers, scopes and clears is bounded."""

from collections.abc import AsyncIterator

import pytest

from kvatlas.blocks.hashing import pack_hashes
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.bus.wire import WORKER_ID, RawMessage
from kvatlas.identity import Scope, shard_of
from kvatlas.index.holder_entries import MAX_HOLDER
from kvatlas.index.redis import scope_registry
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import SCOPE_USES, SCOPES, ShardKeys
from kvatlas.store.connection import Store, connected_store
from tests.eventually import until
from tests.kvatlas.index.message_source import MessageSource, apply_messages, contents

pytestmark = pytest.mark.anyio

WORKERS = 3_000
AT_ONCE = 100
A_SCOPE = 5
"""Number of workers that share a scope: the more scopes, the longer a sweep."""
BLOCKS = 8
CLEARS = 1
SHARDS = 2
SHARED = Scope("model", "tokenizer")


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_valkey, wait=False) as opened:
        yield opened


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    return await open_redis_index(store, partitions=8, shards=SHARDS, side_index=True, writer=True, reuse_ms=1)


async def apply_all(index: RedisIndex, messages: list[RawMessage]) -> None:
    """Apply the messages in one call per shard."""
    by_partition: dict[int, list[RawMessage]] = {}
    for message in messages:
        by_partition.setdefault(partition_of(message[WORKER_ID], index.partitions), []).append(message)
    for shard in range(index.shards):
        mine = [PartitionBatch(p, some) for p, some in by_partition.items() if shard_of(p, index.shards) == shard]
        applied = await index.apply(shard, mine)
        assert applied.applied == sum(len(batch.messages) for batch in mine)


async def run_generation(index: RedisIndex, number: int) -> None:
    """AT_ONCE workers appear, in their own scopes and in a shared one, and are gone for good."""
    sources = [MessageSource(f"worker-{number}-{i}") for i in range(AT_ONCE)]
    messages: list[RawMessage] = []
    for i, source in enumerate(sources):
        own = Scope("model", "tokenizer", None, f"tenant-{number}-{i // A_SCOPE}")
        hashes = pack_hashes([(number * AT_ONCE + i) * 1_000 + at for at in range(1, BLOCKS + 1)])
        messages.append(source.begin(1))
        for _ in range(CLEARS):
            messages += [source.store(own, hashes), source.store(SHARED, hashes[:8]), source.clear()]
        messages.append(source.store(own, hashes))
    await apply_all(index, messages)
    for source in sources:
        assert await index.retire(source.worker_id, 1)
    for shard in range(index.shards):

        async def is_swept(shard: int = shard) -> bool:
            return await index.sweep(shard, 100_000) == 0

        await until(is_swept, what="retired holders are swept")
    for source in sources:
        assert await index.forget(source.worker_id, 1)
    while await index.forget_scopes(0.0):
        pass


async def sizes(store: Store) -> dict[str, int]:
    """The size of each key that may grow."""
    client, found = (
        store.client,
        {SCOPES: await store.client.hlen(SCOPES), SCOPE_USES: await store.client.zcard(SCOPE_USES)},
    )
    for shard in range(SHARDS):
        k = ShardKeys(shard)
        for key in (k.holders, k.active, k.digests, k.touched, k.held, k.moments, k.workers):
            found[key] = await client.hlen(key)
        found[k.retired] = await client.scard(k.retired)
        found["blocks"] = found.get("blocks", 0) + len([key async for key in client.scan_iter(f"kva:{{s{shard}}}:*:*")])
    return found


async def memory_of_keys(store: Store) -> int:
    """Bytes of all keys with their values."""
    return sum([await store.client.memory_usage(key, samples=0) for key in await store.client.keys()])


async def memory_of_data(store: Store) -> int:
    """Bytes of everything but overhead. Connections' buffers, 16 KiB each, count as overhead only after some time."""
    info = await store.client.info("memory")
    return int(info["used_memory_dataset"])


async def test_the_store_keeps_nothing_of_workers_and_scopes_that_are_gone(
    index: RedisIndex, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scope_registry, "MOST_USED_SCOPES", 0)  # as if no more names could be kept for `usage`
    await store.client.config_set("latency-tracking", "no")  # 16 KiB and more when a command is used for the first time
    used: list[tuple[int, int]] = []
    for number in range(WORKERS // AT_ONCE):
        await run_generation(index, number)
        await store.client.slowlog_reset()  # it keeps the arguments of slow calls
        used.append((await memory_of_keys(store), await memory_of_data(store)))
    assert not any((await sizes(store)).values()), await sizes(store)
    given = AT_ONCE * (2 + CLEARS)  # holders of one generation: begin, clears
    for shard in range(SHARDS):
        k = ShardKeys(shard)
        assert int(await store.client.hget(k.meta, "next")) == await store.client.llen(k.free) <= 2 * given
    (keys_then, data_then), (keys_now, _) = used[4], used[-1]
    assert keys_now < keys_then + 1_000, used

    async def is_data_bounded() -> bool:
        return await memory_of_data(store) < data_then + 50_000

    await until(is_data_bounded, what=f"no more memory than in the fifth generation: {used}")


async def test_a_scope_is_forgotten_only_without_blocks_and_messages(index: RedisIndex, store: Store) -> None:
    held, used_recently, gone = (Scope("model", "tokenizer", None, tenant) for tenant in ("held", "recently", "gone"))
    one, other = MessageSource("one"), MessageSource("other")
    hashes = pack_hashes(range(1, 20))
    await apply_messages(
        index, one.begin(1), one.store(held, hashes), one.store(gone, hashes), one.remove(gone, hashes)
    )
    await apply_messages(index, other.begin(1), other.store(used_recently, hashes), other.remove(used_recently, hashes))
    for scope in (held, gone):  # no message has used them for an hour
        await store.client.zincrby(SCOPE_USES, -3_600_000.0, scope.scope_id)
    assert await index.forget_scopes(600.0) == 1
    assert set(await store.client.hkeys(SCOPES)) == {held.scope_id, used_recently.scope_id}
    assert await index.forget_scopes(600.0) == 0
    assert await contents(index, "one") == one.held
    # it comes into use again, through the writer that already knew it
    forget_fresh_scopes(index)
    await apply_messages(index, one.store(gone, hashes))
    assert await store.client.hget(SCOPES, gone.scope_id) == gone.canonical
    assert await contents(index, "one") == one.held


def forget_fresh_scopes(index: RedisIndex) -> None:
    """Forget them, as if a second had passed."""
    index._registry._fresh.clear()


async def test_a_worker_without_a_holder_number_is_closed_and_comes_back_when_there_is_one(
    index: RedisIndex, store: Store
) -> None:
    first, second = MessageSource("first"), MessageSource("second")
    k = ShardKeys(shard_of(partition_of("second", index.partitions), index.shards))
    hashes = pack_hashes(range(1, 20))
    await apply_messages(index, second.begin(1), second.store(SHARED, hashes))
    await apply_messages(index, first.begin(1), first.store(SHARED, hashes))
    before = await store.client.hget(k.meta, "next")
    await store.client.hset(k.meta, "next", MAX_HOLDER)
    refused = await apply_messages(index, second.begin(2), second.store(SHARED, hashes))
    [record] = refused.records
    assert record.oom and record.closed and not record.answering
    assert await contents(index, "first") == first.held
    assert await contents(index, "second") == {}
    await index.sweep(k.shard, 100_000)
    assert int(await store.client.hget(k.meta, "next")) == MAX_HOLDER > int(before)
    assert await store.client.llen(k.free) == 1

    async def is_applied() -> bool:
        second.held.clear()
        return bool((await apply_messages(index, second.begin(second.incarnation + 1))).records[0].answering)

    await until(is_applied, what="a freed number is given again")
    await apply_messages(index, second.store(SHARED, hashes))
    assert await contents(index, "second") == second.held
