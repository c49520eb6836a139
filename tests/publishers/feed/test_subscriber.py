"""The feed: what replay returns, when other tasks get a turn, and a feed that stays away."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import anyio
import anyio.lowlevel
import pytest
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.feed.continuity import Continuity
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.subscriber import BATCHES_AT_ONCE, Feed, FeedSettings
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.publishers.engines.engine_http import engine_http
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.sidecars import assert_published, ledger_of, settings, sidecar

pytestmark = pytest.mark.anyio


async def test_lost_batches_are_filled_from_replay(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine(topic=b"kv") as engine, sidecar(engine, nats_url, topic="kv") as publisher:
        await engine.send(*payloads[:50])
        await until(lambda: publisher.counters.engine_batches == 50, what="the batches before the gap are taken")
        for payload in payloads[50:60]:
            engine.lose(payload)
        await engine.send(*payloads[60:])
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps == publisher.counters.feed_gaps_filled == 1
        assert publisher.counters.snapshots == 1


async def test_replay_of_older_engines_has_no_topic_frame(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.11.1-array")
    async with FakeEngine(replay_topic=False) as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:20])
        await until(lambda: publisher.counters.engine_batches == 20, what="the batches before the gap are taken")
        engine.lose(payloads[20])
        await engine.send(*payloads[21:])
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps_filled == 1


async def test_a_lost_last_batch_is_seen_when_the_feed_is_silent(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:-1])
        engine.lose(payloads[-1])
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps == 0


async def test_a_sidecar_that_starts_late_asks_for_earlier_batches(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine:
        await engine.send(*payloads[:100])
        async with sidecar(engine, nats_url) as publisher:
            await engine.send(*payloads[100:])
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))


async def test_a_gap_that_cannot_be_filled_starts_over_empty(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, replay_endpoint=None) as publisher:
        await engine.send(*payloads[:50])
        engine.lose(payloads[50])
        await engine.send(*payloads[51:])
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads[51:]))
        assert publisher.counters.feed_started_over == 1
        assert publisher.counters.snapshots == 2


@contextmanager
def open_feed(
    engine: FakeEngine,
    on_batch: Callable[[EngineBatch], object],
    on_empty: Callable[[], None] = lambda: None,
    engine_up: Callable[[], bool] = lambda: False,
) -> Iterator[Feed]:
    """A feed without a publisher, with short pauses."""
    settings = FeedSettings(
        EngineKind.VLLM, engine.endpoint, engine.replay_endpoint, first_silence_s=0.05, replay_silence_s=0.05
    )
    context = zmq.asyncio.Context()
    letters = DeadLetters(None, "w")
    feed = Feed(
        settings,
        "w",
        Continuity(),
        PublisherCounters(),
        Diagnoses("w"),
        letters,
        context,
        on_batch=on_batch,
        on_empty=on_empty,
        engine_up=engine_up,
    )
    feed.open()
    try:
        yield feed
    finally:
        feed.close()
        context.destroy(linger=0)


async def test_other_tasks_have_their_turn_while_messages_wait() -> None:
    """Otherwise the batches would never be folded, and heartbeats and acknowledgements would wait."""
    _, payloads = recording("vllm-0.33.0")
    turns = 0
    taken_in: list[int] = []

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with FakeEngine() as engine:
        with open_feed(engine, lambda _: taken_in.append(turns)) as feed:
            await engine.subscribed()
            await engine.send(*payloads * 4)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take_turns)
                tasks.start_soon(feed.run)
                await until(lambda: len(taken_in) == 4 * len(payloads), what="all batches taken")
                tasks.cancel_scope.cancel()
    assert max(Counter(taken_in).values()) <= BATCHES_AT_ONCE


async def test_a_feed_that_stays_away_while_the_engine_is_up_drops_everything_held() -> None:
    _, payloads = recording("vllm-0.33.0")
    ledger = Ledger(LedgerSettings("model", "model"))
    known_to_be_up = False
    async with anyio.create_task_group() as tasks, AsyncExitStack() as opened:
        async with FakeEngine() as engine:
            feed = opened.enter_context(open_feed(engine, ledger.fold, ledger.empty, lambda: known_to_be_up))
            tasks.start_soon(feed.run)
            await engine.subscribed()
            await engine.send(*payloads)
            await until(
                lambda: ledger.digest == ledger_of(EngineKind.VLLM, payloads).digest, what="all batches ledger_of"
            )
        assert ledger.announced_blocks
        known_to_be_up = True
        await until(lambda: not ledger.announced_blocks, what="nothing is announced")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("kind", "recorded"), [(EngineKind.VLLM, "vllm-0.33.0"), (EngineKind.SGLANG, "sglang-0.5.23")])
async def test_an_engine_that_lists_another_port_after_its_restart_is_followed(
    nats_client: Client, nats_url: str, kind: EngineKind, recorded: str
) -> None:
    """For example, an engine with tcp://*:0."""
    _, payloads = recording(recorded)
    with engine_http() as http:

        def list_sources(engine: FakeEngine) -> None:
            source = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
            }
            http.pages |= {"/health": (200, ""), "/kv_event_sources": (200, json.dumps({"0": source}))}
            http.pages["/server_info"] = (200, json.dumps({"kv_event_sources": [{"dp_rank": 0, **source}]}))

        async with anyio.create_task_group() as tasks:
            async with FakeEngine() as engine:
                list_sources(engine)
                started: list[Publisher] = []
                wanted = settings(engine, nats_url, engine=kind, engine_url=http.url)
                tasks.start_soon(run_sidecar, wanted, started.extend)
                await until(lambda: started, what="the sidecar is ready")
                publisher = started[0]
                await engine.send(*payloads[:50])
                await until(lambda: publisher.counters.engine_batches == 50, what="its batches are taken")
            async with FakeEngine() as engine:
                list_sources(engine)
                await engine.subscribed()
                await engine.send(*payloads[60:120])
                await assert_published(nats_client, publisher, ledger_of(kind, payloads[60:120]))
                assert publisher.counters.feed_restarts == 1
            tasks.cancel_scope.cancel()
