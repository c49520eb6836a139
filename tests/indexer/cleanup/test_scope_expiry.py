import pytest

from indexer.cleanup.scope_expiry import UnusedScopes
from indexer.counters import IndexerCounters
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from tests.kvatlas.index.message_source import MessageSource, apply_messages

pytestmark = pytest.mark.anyio


async def test_the_owner_of_the_first_partition_forgets_for_all() -> None:
    index, counters, owned = MemoryIndex(shards=4), IndexerCounters(), {1, 5}
    teller, scope = MessageSource("w"), Scope("model", "tokenizer")
    await apply_messages(index, teller.begin(1), teller.store(scope, b"12345678"), teller.remove(scope, b"12345678"))
    unused = UnusedScopes(index, counters, lambda: owned)
    await unused.tick()
    assert counters.scopes_forgotten == 0
    owned.add(0)
    await unused.tick()
    assert counters.scopes_forgotten == 1
