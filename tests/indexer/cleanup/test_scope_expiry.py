import pytest

from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_indexer.cleanup.scope_expiry import ScopeExpiry
from kvatlas_indexer.counters import IndexerCounters
from tests.indexer.idle_readers import owned_partitions
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio


async def test_the_owner_of_the_first_partition_deletes_unused_scopes() -> None:
    index, counters = MemoryIndex(shards=4), IndexerCounters()
    source, scope = MessageSource("w"), Scope("model", "tokenizer")
    await apply_messages(index, source.begin(1), source.store(scope, b"12345678"), source.remove(scope, b"12345678"))
    async with owned_partitions(1, 5) as owned:
        expiry = ScopeExpiry(index, counters, owned)
        await expiry.tick()
        assert counters.scopes_forgotten == 0
        owned.start([0])
        await expiry.tick()
        assert counters.scopes_forgotten == 1
