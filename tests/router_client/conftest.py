import os
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, connected_store


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    """An empty store."""
    async with connected_store(valkey_url, wait=False) as opened:
        await opened.client.flushall()
        yield opened


@pytest.fixture
async def indexes(store: Store) -> list[ResidencyIndex]:
    """Empty indexes of both kinds; the one in the store has four shards."""
    return [MemoryIndex(), MemoryIndex(shards=4), await open_redis_index(store, shards=4, writer=True)]


@pytest.fixture(params=["memory", "valkey"])
async def index(request: pytest.FixtureRequest, store: Store) -> ResidencyIndex:
    """An empty index, of each kind."""
    if request.param == "memory":
        return MemoryIndex()
    return await open_redis_index(store, writer=True)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans of one test; the global tracer provider can be set only once per process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its package has the map, so nothing is downloaded
