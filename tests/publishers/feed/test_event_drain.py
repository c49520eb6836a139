"""A publisher of an engine whose events are read over HTTP, each only once, with a real server and a real NATS."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from kvatlas.fleet.records import EngineKind
from kvatlas.settings import PublishSettings
from kvatlas_publishers.feed.event_drain import SUSPICIOUS_GAPS, DrainPosition
from kvatlas_publishers.feed.undecodable import BURST
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.http_client import http_client
from tests.publishers.published_stream import read_stream
from tests.publishers.trtllm_serve import BLOCK, TrtllmServe, serving

pytestmark = pytest.mark.anyio

PROMPT = list(range(1, 4 * BLOCK + 1))


@pytest.fixture
def engine() -> Iterator[TrtllmServe]:
    with serving(TrtllmServe()) as served:
        yield served


@asynccontextmanager
async def publishing(engine: TrtllmServe, nats_url: str) -> AsyncIterator[Publisher]:
    settings: dict[str, Any] = {"worker_id": "w", "model_id": "m", "nats_url": nats_url, "engine_url": engine.url}
    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        tasks.start_soon(run_sidecar, PublishSettings.load(engine=EngineKind.TENSORRT_LLM, **settings), started.extend)
        await until(lambda: started, what="the publisher is ready")
        yield started[0]
        tasks.cancel_scope.cancel()


async def holds(publisher: Publisher, blocks: int) -> None:
    await until(lambda: publisher.ledger.announced_blocks == blocks, what=f"{blocks} blocks are held")


async def test_what_the_engine_holds_is_in_the_stream(nats_client: Client, nats_url: str, engine: TrtllmServe) -> None:
    names = engine.store(PROMPT)
    async with publishing(engine, nats_url) as publisher:
        await holds(publisher, 4)
        assert publisher.engine.state.value == "up"
        engine.remove(names[3])
        engine.move(names[2], 0, 1)
        await holds(publisher, 3)
        await publisher.flush()
        published = await read_stream(nats_client)
        assert await published.index.digest("w") == publisher.ledger.digest_words
        assert publisher.counters.feed_started_over == 0 and not publisher.diagnoses.current


async def test_a_gap_drops_what_was_held(nats_client: Client, nats_url: str, engine: TrtllmServe) -> None:
    names = engine.store(PROMPT)
    async with publishing(engine, nats_url) as publisher:
        await holds(publisher, 4)
        engine.remove(names[3])
        engine.drain()  # another reader has the removal now
        engine.store([8] * BLOCK)
        await holds(publisher, 1)
        assert (publisher.counters.feed_gaps, publisher.counters.feed_started_over) == (1, 1)


async def test_a_restarted_engine_holds_what_it_stores_from_then_on(
    nats_client: Client, nats_url: str, engine: TrtllmServe
) -> None:
    engine.store(PROMPT)
    async with publishing(engine, nats_url) as publisher:
        await holds(publisher, 4)
        engine.restart()
        engine.store([8] * 2 * BLOCK)
        await holds(publisher, 2)
        assert publisher.counters.feed_restarts == 1


async def test_another_reader_of_the_same_engine_is_named(
    nats_client: Client, nats_url: str, engine: TrtllmServe
) -> None:
    async with publishing(engine, nats_url) as publisher:
        for at in range(2 * BURST):
            drained = engine.drains
            engine.store([at + 1] * BLOCK)
            engine.drain()
            engine.store([at + 100] * BLOCK)
            await until(lambda seen=drained: engine.drains >= seen + 3, what="the rest is read")  # type: ignore[misc]
        [found] = publisher.diagnoses.current
        assert found.seen.startswith(f"events of {engine.url}/kv_cache_events were missing")
        assert "stop other readers of that address" in found.cure
        assert publisher.counters.feed_gaps >= SUSPICIOUS_GAPS
        assert publisher.counters.feed_started_over <= BURST + 1, "each one costs the index an incarnation"
        assert publisher.ledger.announced_blocks <= 1


async def test_an_engine_that_gives_no_events_is_named_with_the_cure(
    nats_client: Client, nats_url: str, engine: TrtllmServe
) -> None:
    engine.status = 500
    async with publishing(engine, nats_url) as publisher:
        [found] = await until(lambda: publisher.diagnoses.current, what="something is wrong")
        assert found.seen == f"POST {engine.url}/kv_cache_events: answer 500 event_buffer_max_size is 0"
        assert "event_buffer_max_size above 0" in found.cure
        engine.status = 200
        engine.store(PROMPT)
        await holds(publisher, 4)
        assert not publisher.diagnoses.current


async def test_an_engine_that_stops_answering_loses_what_was_held(
    nats_client: Client, nats_url: str, engine: TrtllmServe
) -> None:
    engine.store(PROMPT)
    async with publishing(engine, nats_url) as publisher:
        await holds(publisher, 4)
        engine.status = 503
        await holds(publisher, 0)
        engine.status = 200
        engine.store([8] * BLOCK)
        await holds(publisher, 1)


async def test_attention_ranks_are_refused_in_one_line(nats_client: Client, nats_url: str, engine: TrtllmServe) -> None:
    engine.store(PROMPT)
    async with publishing(engine, nats_url) as publisher:
        await holds(publisher, 4)
        engine.put({"type": "removed", "block_hashes": [5]}, attention_dp_rank=1)
        [found] = await until(lambda: publisher.diagnoses.current, what="something is wrong")
        assert "several attention ranks" in found.seen and "enable_attention_dp" in found.cure
        assert publisher.ledger.announced_blocks == 0


async def test_only_adapters_hashes_are_named(nats_client: Client, nats_url: str, engine: TrtllmServe) -> None:
    async with publishing(engine, nats_url) as publisher:
        for at in range(8):
            engine.store([at + 1] * BLOCK, adapter=True)
        [found] = await until(lambda: publisher.diagnoses.current, what="something is wrong")
        assert "adapters, or another version's hashes" in found.seen
        assert publisher.counters.skipped_events == 8
        engine.store(PROMPT)
        await holds(publisher, 4)
        await until(lambda: not publisher.diagnoses.current, what="plain prompts are heard")


def test_a_position_goes_on_without_a_gap_only() -> None:
    position = DrainPosition()
    assert [bool(position.take(event_id)) for event_id in (5, 6, 8, 9, 0, 1)] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]
    assert (position.gaps, position.restarts) == (1, 1)


async def test_two_readers_never_get_the_same_record(engine: TrtllmServe) -> None:
    """The fake engine drains as the real one does."""
    engine.store(PROMPT)
    async with http_client() as client:
        answers = [(await client.post(f"{engine.url}/kv_cache_events")).json() for _ in range(2)]
    assert [[record["event_id"] for record in answer] for answer in answers] == [[0, 1], []]


@pytest.mark.parametrize("kind", ["text/event-stream", "application/x-ndjson", ""])
async def test_an_api_that_streams_its_events_is_named(
    nats_client: Client, nats_url: str, engine: TrtllmServe, kind: str
) -> None:
    engine.streams = kind
    async with publishing(engine, nats_url) as publisher:
        [found] = await until(lambda: publisher.diagnoses.current, what="it is named")
        assert found.name == "feed" and "streamed events are not supported" in found.seen
        engine.streams = None
        engine.store(PROMPT)
        await holds(publisher, 4)
        await until(lambda: not publisher.diagnoses.current, what="nothing is wrong any more")


async def test_block_hashes_of_another_algorithm_are_named(
    nats_client: Client, nats_url: str, engine: TrtllmServe
) -> None:
    async with publishing(engine, nats_url) as publisher:
        for at in range(10):
            block = {"block_hash": at, "cache_level": 0, "tokens": [{"token_id": 1, "token_extra_id": 0}] * BLOCK}
            engine.put({"type": "stored", "parent_hash": None, "blocks": [block]}, hash_algo="v2_sha256")
        [found] = await until(lambda: publisher.diagnoses.current, what="it is named")
        assert "their block hashes are v2_sha256" in found.seen and "use_kv_cache_manager_v2" in found.cure
        assert await until(lambda: publisher.gauges().left_out >= 0.9, what="an alert can see it")
