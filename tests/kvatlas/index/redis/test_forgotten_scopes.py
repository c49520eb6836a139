"""A scope that comes into use while unused scopes are forgotten."""

from typing import Any

import pytest

from kvatlas.blocks.hashing import pack_hashes
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import connected_store
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "t")
K = ShardKeys(0)


@pytest.mark.parametrize("again", [True, False])
async def test_a_scope_that_comes_into_use_while_others_are_forgotten_stays_in_the_list(
    fresh_store: str, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A scope that is already in the list, or a new one."""
    block = pack_hashes([1])
    idle, new = Scope("m", "t", None, "idle"), Scope("m", "t", None, "new")
    async with connected_store(fresh_store, wait=False) as store:
        index = await open_redis_index(store, partitions=1, shards=1, writer=True)
        source = MessageSource("w")
        await apply_messages(index, source.begin(1), source.store(SCOPE, block))
        await apply_messages(index, source.store(idle, block), source.remove(idle, block))
        writer = await open_redis_index(store, writer=True)
        used, call, between = idle if again else new, index._functions.call, 0

        async def used_between(function: str, *what: Any) -> Any:
            nonlocal between
            if function == "kvatlas_untouch" and not between:
                between += 1
                await apply_messages(writer, source.store(used, block))
            return await call(function, *what)

        monkeypatch.setattr(index._functions, "call", used_between)
        await index.forget_scopes(0)
        assert between
        [touched] = [value for value in (await store.client.hgetall(K.touched)).values() if value]
        assert {SCOPE.scope_id, used.scope_id} <= {touched[at : at + 8] for at in range(0, len(touched), 16)}
