"""Events between two calls of a scrub or a recount: a failover, a message, a part of one."""

from collections.abc import AsyncIterator, Awaitable, Callable
from copy import copy
from typing import Any

import pytest

from kvatlas.blocks.hashing import pack_hashes
from kvatlas.embedded import valkey_server
from kvatlas.identity import Scope
from kvatlas.index.protocol import ScrubResult
from kvatlas.index.redis import call_plan
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store, connected_store
from tests.kvatlas.index.failover import dump_all, restore
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "t")
K = ShardKeys(0)
BLOCKS = 1_000


@pytest.fixture
async def stores() -> AsyncIterator[list[Store]]:
    """A primary and its replica."""
    async with (
        valkey_server() as first,
        valkey_server() as second,
        connected_store(first.url, wait=False) as one,
        connected_store(second.url, wait=False) as other,
    ):
        yield [one, other]


@pytest.fixture
def address(stores: list[Store]) -> Store:
    """A connection to the primary."""
    return copy(stores[0])


@pytest.fixture
def source() -> MessageSource:
    return MessageSource("w")


@pytest.fixture
async def index(address: Store, source: MessageSource) -> RedisIndex:
    opened = await open_redis_index(address, partitions=1, shards=1, writer=True)
    await apply_messages(opened, source.begin(1), source.store(SCOPE, pack_hashes(range(1, BLOCKS + 1))))
    return opened


async def fail_over(stores: list[Store], address: Store, dump: dict[bytes, bytes]) -> None:
    await restore(stores[1], dump)
    vars(address).update(vars(stores[1]))


async def rest_of_round(index: RedisIndex) -> ScrubResult:
    while not (found := await index.scrub(0, 100)).ended:
        pass
    return found


async def test_a_scrub_begins_again_on_another_server(stores: list[Store], address: Store, index: RedisIndex) -> None:
    assert not (await index.scrub(0, 1)).ended
    await fail_over(stores, address, await dump_all(stores[0]))
    assert await rest_of_round(index) == ScrubResult(1, [], 0, 0, True)


async def test_damage_of_one_server_is_not_that_of_another(
    stores: list[Store], address: Store, index: RedisIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = await dump_all(stores[0])
    await stores[0].client.hdel(K.blocks(SCOPE.scope_id), pack_hashes([7]))
    call = index._functions.call

    async def failing_over(function: str, *what: Any) -> Any:
        if function == "kvatlas_doubt":
            await fail_over(stores, address, sound)
        return await call(function, *what)

    monkeypatch.setattr(index._functions, "call", failing_over)
    assert await rest_of_round(index) == ScrubResult(1, [], 0, 0, True)
    record = await index.record("w")
    assert record is not None and not record.bad


async def test_a_part_of_a_message_is_followed(
    index: RedisIndex, source: MessageSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied between two calls of the scrub, the rest of the message after them."""
    assert not (await index.scrub(0, 1)).ended
    monkeypatch.setattr(call_plan, "CALL_COST", 400)
    call, calls = index._functions.call, 0

    async def scrubbed_between(function: str, *what: Any) -> Any:
        nonlocal calls
        calls += function == "kvatlas_apply"
        if calls == 2:
            calls += 1
            assert await rest_of_round(index) == ScrubResult(1, [], 0, 0, True)
        return await call(function, *what)

    monkeypatch.setattr(index._functions, "call", scrubbed_between)
    await apply_messages(index, source.remove(SCOPE, pack_hashes(range(BLOCKS, 0, -1))))
    assert calls > 3
    monkeypatch.undo()
    assert await rest_of_round(index) == ScrubResult(1, [], 0, 0, True)


@pytest.mark.parametrize("calls", range(6))
async def test_a_recount_that_ends_on_another_server_is_void(
    stores: list[Store], address: Store, index: RedisIndex, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The other server has the same data in another order, so a scan that continues there misses blocks."""
    [whole] = await index.recount(["w"])
    dump, sent = await dump_all(stores[0]), 0

    def failing_over(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def sending(store: Store, *what: Any, **how: Any) -> Any:
            nonlocal sent
            if store is address and sent == calls:
                await fail_over(stores, address, dump)
            sent += store is address
            return await send(store, *what, **how)

        return sending

    monkeypatch.setattr(Store, "_call", failing_over(Store._call))
    monkeypatch.setattr(Store, "ask", failing_over(Store.ask))
    [counted] = await index.recount(["w"])
    assert sent > calls
    assert counted == whole or counted.moved
