"""Copies of a store whose workers continue to publish while the copies are made."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.events import Checkpoint
from kvatlas.identity import Scope
from kvatlas.index.local_copy.digest_check import differing_workers
from kvatlas.index.local_copy.store_copy import copy_shard
from kvatlas.index.mark_lookup import SEGMENT
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas.store.connection import Store, connected_store
from tests.kvatlas.index.message_source import MessageSource, apply_messages, split

pytestmark = pytest.mark.anyio

SCOPES = [Scope("m", "t"), Scope("m", "t", "lora")]
LENGTH = 80
TRUNK = extend_chain(range(4 * LENGTH), 4)
BRANCH = TRUNK[: 8 * 30] + extend_chain(
    range(9_000, 9_000 + 4 * 50), 4, int.from_bytes(TRUNK[8 * 29 : 8 * 30], "little")
)
CHAINS = [TRUNK, BRANCH]
PLACES = {
    key: (chain[8 * (i - i % SEGMENT) :][:8], i % SEGMENT) for chain in CHAINS for i, key in enumerate(split(chain))
}


class Worker(MessageSource):
    """Publishes random messages of prefix-closed residency; `marked`: it is a hybrid."""

    def __init__(self, worker_id: str, rng: random.Random, *, marked: bool) -> None:
        super().__init__(worker_id, dropped=1 if marked else None, places=PLACES)
        self.rng = rng
        self.incarnation = 0

    def publish(self) -> list[wire.RawMessage]:
        if not self.incarnation:
            return [self.begin(1)]
        scope, chain = self.rng.choice(SCOPES), self.rng.choice(CHAINS)
        keys = split(chain)
        held = next((i for i, key in enumerate(keys) if (scope, key) not in self.held), LENGTH)
        acts: list[Callable[[], list[wire.RawMessage]]] = [
            lambda: self.extend(scope, chain, held),
            lambda: self.extend(scope, chain, held),
            lambda: [self.store(scope, chain[: 8 * max(1, held // 2)], Tier.CPU_DRAM)] if held else [],
            lambda: self.evict(scope, self.rng.randrange(LENGTH), chain),
            lambda: [self.message(Checkpoint(self.digest_words()))],
            lambda: self.mark_some(scope, keys[:held]),
        ]
        if self.rng.random() < 0.06:
            acts = [lambda: [self.begin(self.incarnation + 1)], lambda: [self.clear()]]
        return self.rng.choice(acts)()

    def extend(self, scope: Scope, chain: bytes, held: int) -> list[wire.RawMessage]:
        more = chain[8 * held : 8 * (held + self.rng.randrange(1, 40))]
        return [self.store(scope, more)] if more else []

    def evict(self, scope: Scope, depth: int, chain: bytes) -> list[wire.RawMessage]:
        gone = set(split(chain)[depth:])
        if depth < 30:
            gone |= {key for other in CHAINS for key in split(other)[depth:]}
        messages = []
        if marked := [key for one, key in self.marks if one == scope and key in gone]:
            messages.append(self.mark(scope, marked, unmark=True))
        for tier in (Tier.HBM, Tier.CPU_DRAM):
            if keys := [key for key in gone if tier in self.held.get((scope, key), ())]:
                messages.append(self.remove(scope, b"".join(keys), tier))
        return messages

    def mark_some(self, scope: Scope, keys: list[bytes]) -> list[wire.RawMessage]:
        if self.dropped is None or not keys:
            return []
        key = self.rng.choice(keys)
        return [self.mark(scope, [key], unmark=(scope, key) in self.marks)]


class BusyReader(ShardReader):
    """A reader for which something happens to the store before each read."""

    def __init__(self, store: Store, before: Callable[[], Awaitable[None]]) -> None:
        super().__init__(store, ShardKeys(0))
        self._before = before

    async def scan(self, key: str) -> AsyncIterator[dict[bytes, bytes]]:
        async for some in super().scan(key):
            await self._before()
            yield some
            await self._before()

    async def all_touched(self) -> dict[bytes, dict[bytes, BlockSizes]]:
        await self._before()
        return await super().all_touched()

    async def dropped(self) -> dict[bytes, int]:
        await self._before()
        return await super().dropped()


@pytest.fixture
async def store(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A store that is scanned a few blocks at a time, as if there were many."""
    monkeypatch.setattr("kvatlas.index.redis.shard_reader.BLOCKS_A_CALL", 8)
    async with connected_store(valkey_url, wait=False) as opened:
        await opened.client.flushall()
        before = (await opened.client.config_get("hash-max-listpack-entries"))["hash-max-listpack-entries"]
        await opened.client.config_set("hash-max-listpack-entries", 0)
        yield opened
        await opened.client.config_set("hash-max-listpack-entries", before)


async def assert_equal(copy: MemoryIndex, index: RedisIndex, store: Store) -> None:
    """Compare everything that a router asks, and the digests of blocks and marks."""
    for scope in SCOPES:
        for chain in CHAINS:
            here, there = await copy.overlap(scope, chain, verify=True), await index.overlap(scope, chain)
            assert here.differences == ()
            assert here.depths() == there.depths()
            assert here.reach() == there.reach()
            assert here.runs_by_worker() == there.runs_by_worker()
    workers = [record.worker_id for record in await index.records(0)]
    answering = [record.worker_id for record in await index.records(0) if record.answering]
    assert await differing_workers(IndexFunctions(store), ShardKeys(0), copy.shard_at(0), workers) == (
        [],
        len(answering),
    )


@given(seed=st.integers(0, 10**9), before=st.integers(0, 60), pace=st.integers(0, 4))
@example(seed=9747778, before=5, pace=4)  # a hybrid's holder was cleared and swept between two reads
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_copy_is_exact_once_it_has_the_messages_since_it_was_begun(
    store: Store, seed: int, before: int, pace: int
) -> None:
    await store.client.flushall()
    index = await open_redis_index(store, writer=True)
    rng = random.Random(seed)
    workers = [Worker(f"w{i}", rng, marked=i > 1) for i in range(4)]
    since: list[wire.RawMessage] = []

    async def publish(count: int) -> None:
        for _ in range(count):
            for message in rng.choice(workers).publish():
                since.append(message)
                await apply_messages(index, message)
        if rng.random() < 0.2:
            await index.sweep(0, 40)

    await publish(before)
    since.clear()
    copy = MemoryIndex(side_index=False)
    await copy_shard(BusyReader(store, lambda: publish(pace)), copy.shard_at(0), lambda _: None)
    for message in since:
        await apply_messages(copy, message)
    await assert_equal(copy, index, store)
    await publish(10)  # it continues like any index
    while await copy.sweep(0, 50):
        pass
    for message in since[-40:]:
        await apply_messages(copy, message)
    await assert_equal(copy, index, store)


async def test_a_copy_that_misses_a_message_differs(store: Store) -> None:
    index = await open_redis_index(store, writer=True)
    worker = MessageSource("w0")
    await apply_messages(index, worker.begin(1), worker.store(SCOPES[0], TRUNK[:80]))
    copy = MemoryIndex(side_index=False)
    await copy_shard(ShardReader(store, ShardKeys(0)), copy.shard_at(0), lambda _: None)
    copy.shard_at(0).table.blocks[SCOPES[0].scope_id].pop(TRUNK[:8])
    copy.shard_at(0).table.holders[1].digest.add(SCOPES[0].scope_id, Tier.HBM, TRUNK[:8], -1)
    assert await differing_workers(IndexFunctions(store), ShardKeys(0), copy.shard_at(0), ["w0"]) == (["w0"], 1)
