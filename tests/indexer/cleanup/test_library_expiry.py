"""Function libraries that no process uses are deleted."""

from pathlib import Path

import pytest

from kvatlas.store.connection import Store
from kvatlas.store.function_library import FunctionLibrary, mark_key
from kvatlas_indexer.cleanup.library_expiry import UNUSED_S, LibraryExpiry
from kvatlas_indexer.counters import IndexerCounters
from tests.indexer.idle_readers import owned_partitions

pytestmark = pytest.mark.anyio

LEFT, USED, UNTAGGED = "kvatlas_test_00000000", "kvatlas_test_11111111", "kvatlas_test"


async def test_the_owner_of_the_first_partition_deletes_unused_libraries(store: Store, tmp_path: Path) -> None:
    own = FunctionLibrary("kvatlas_test", tmp_path, ())
    await own.load(store)
    for name in (LEFT, USED, UNTAGGED):
        await store.load_functions(f"#!lua name={name}\nredis.register_function('f_{name}', function() end)")
    await store.client.set(mark_key(USED), 1)
    everything = sorted([LEFT, USED, UNTAGGED, own.name])
    async with owned_partitions(1, 5) as owned:
        expiry = LibraryExpiry(store, [own], IndexerCounters(), owned)
        for now_s in (0.0, UNUSED_S):
            await expiry.tick(now_s)
        assert await store.list_libraries() == everything
        owned.start([0])
        await expiry.tick(UNUSED_S)
        await store.client.set(mark_key(LEFT), 1)  # a process uses it again
        await expiry.tick(1.5 * UNUSED_S)
        await store.client.delete(mark_key(LEFT))
        for now_s in (2 * UNUSED_S, 3 * UNUSED_S - 1):
            await expiry.tick(now_s)
        assert await store.list_libraries() == everything
        await expiry.tick(3 * UNUSED_S)
        assert await store.list_libraries() == sorted([USED, UNTAGGED, own.name])
