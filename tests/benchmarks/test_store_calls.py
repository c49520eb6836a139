"""The longest call to the store is found, and named after the function that kvatlas called."""

from pathlib import Path

import pytest

from benchmarks.store_calls import LONGEST_MS, TimedStore, store_calls
from kvatlas.embedded import valkey_server
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
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


async def test_loading_functions_is_a_figure_of_its_own(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store, store_calls(store) as calls:
        await store.client.config_set("slowlog-log-slower-than", 0)
        await INDEX_LIBRARY.load(store)
        longest, load, result = await calls.longest(), await calls.longest_load(), await calls.result("start")
    assert longest is None or longest.command != "FUNCTION"
    assert load is not None
    assert f"functions loaded, once a version: {load.ms:.1f} ms" in result.name


async def test_without_a_long_call_the_budget_is_met(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store, store_calls(store) as calls:
        await store.client.flushall()  # the benchmarks' own calls don't count as kvatlas'
        result = await calls.result("nothing")
    assert result.met and result.budget == LONGEST_MS


async def test_the_stores_settings_are_as_before(fresh_store: str) -> None:
    names = ("slowlog-log-slower-than", "slowlog-max-len")
    async with connected_store(fresh_store, wait=False) as store:
        before = await store.client.config_get(*names)
        async with store_calls(store):
            assert await store.client.config_get(*names) != before
        assert await store.client.config_get(*names) == before


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the times are those of Linux' /proc")
async def test_a_timed_store_has_the_processor_time_of_its_longest_call() -> None:
    async with valkey_server() as server, connected_store(server.url, wait=False) as plain:
        store = TimedStore(plain, server.pid)
        await store.open()
        await store.client.function_load(LIBRARY)
        await store.fcall("slow_one", [], [])
        await store.fcall("quick_one", [], [])
        longest = store.by_processor
        assert longest.command == "FCALL slow_one" and longest.processor >= 1 and longest.clock >= 1
        store.forget()
        await store.client.eval("local n = 0 for i = 1, 1e6 do n = n + i end return 1", 0)
        assert store.by_clock.command == "EVAL" and store.by_clock.processor >= 1
