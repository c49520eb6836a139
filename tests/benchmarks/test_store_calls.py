"""The longest call to the store is found, and named by what kvatlas calls."""

import pytest

from benchmarks.store_calls import LONGEST_MS, store_calls
from kvatlas.store.connection import connected_store

pytestmark = pytest.mark.anyio

LIBRARY = """#!lua name=slow
redis.register_function('slow_one', function() local n = 0 for i = 1, 3e6 do n = n + i end return 1 end)
redis.register_function('quick_one', function() return 1 end)
"""


async def test_the_longest_call_is_named_with_its_function(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store, store_calls(store) as calls:
        await store.client.function_load(LIBRARY, replace=True)
        await store.fcall("quick_one", [], [])
        await store.fcall("slow_one", [], [])
        longest = await calls.longest()
    assert longest is not None and longest.command == "FCALL slow_one" and longest.ms >= 1


async def test_without_a_long_call_the_budget_is_met(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store, store_calls(store) as calls:
        await store.client.flushall()  # what benchmarks do themselves is no call of kvatlas
        result = await calls.result("nothing")
    assert result.met and result.budget == LONGEST_MS


async def test_the_stores_settings_are_as_before(fresh_store: str) -> None:
    names = ("slowlog-log-slower-than", "slowlog-max-len")
    async with connected_store(fresh_store, wait=False) as store:
        before = await store.client.config_get(*names)
        async with store_calls(store):
            assert await store.client.config_get(*names) != before
        assert await store.client.config_get(*names) == before
