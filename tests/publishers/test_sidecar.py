"""Real engine bytes over real ZMQ, through the sidecar, into a real stream."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from kvatlas.bus import StreamSettings, connect_nats, ensure_stream
from kvatlas.fleet import EngineKind
from kvatlas.settings import PublishSettings
from publishers.engines import decode_batch
from publishers.ledger import Ledger, LedgerSettings
from publishers.publisher import Publisher
from publishers.sidecar import run_sidecar
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.told import read_stream
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(fresh_nats: str) -> AsyncIterator[Client]:
    client = await connect_nats(fresh_nats, name="test")
    await ensure_stream(client, StreamSettings(storage="memory"))
    yield client
    await client.close()


def settings(fake: FakeEngine, nats_url: str, **fields: Any) -> PublishSettings:
    return PublishSettings(
        **{
            "engine": EngineKind.VLLM,
            "endpoint": fake.endpoint,
            "replay_endpoint": fake.replay_endpoint,
            "worker_id": "w",
            "model_id": "model",
            "nats_url": nats_url,
            **fields,
        }
    )


@asynccontextmanager
async def sidecar(fake: FakeEngine, nats_url: str, **fields: Any) -> AsyncIterator[Publisher]:
    """A sidecar whose feed is subscribed to the engine."""
    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        tasks.start_soon(run_sidecar, settings(fake, nats_url, **fields), started.extend)
        await until(lambda: started, what="the sidecar is ready")
        await fake.subscribed()
        yield started[0]
        tasks.cancel_scope.cancel()


def folded(kind: EngineKind, payloads: list[bytes], **fields: Any) -> Ledger:
    """What a publisher that saw all of it announces."""
    ledger = Ledger(LedgerSettings("model", "model", **fields))
    for payload in payloads:
        ledger.fold(decode_batch(kind, payload))
    return ledger


async def told_equals(client: Client, publisher: Publisher, ledger: Ledger) -> None:
    with anyio.fail_after(20):
        await until(lambda: publisher.ledger.digest == ledger.digest, what="all batches folded")
        await publisher.flush()
    told = await read_stream(client)
    assert await told.index.digest(publisher.worker_id) == ledger.digest.words
    assert told.outcomes["failed_checks"] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vllm-0.11.1-array", EngineKind.VLLM),
        ("vllm-0.22.0-array", EngineKind.VLLM),
        ("vllm-0.33.0", EngineKind.VLLM),
        ("vllm-0.33.0-bytes", EngineKind.VLLM),
        ("vllm-0.33.0-hybrid", EngineKind.VLLM),
        ("sglang-0.5.23", EngineKind.SGLANG),
        ("sglang-0.5.23-host", EngineKind.SGLANG),
    ],
)
async def test_a_recording_ends_in_what_the_engine_held(
    client: Client, nats_url: str, name: str, kind: EngineKind
) -> None:
    head, payloads = recording(name)
    async with FakeEngine() as engine, sidecar(engine, nats_url, engine=kind) as publisher:
        await engine.send(*payloads)
        ledger = folded(kind, payloads)
        await told_equals(client, publisher, ledger)
        assert ledger.digest.blocks >= len(head["expected_usable"]) > 0
        assert publisher.counters.engine_batches == len(payloads)


async def test_lost_batches_are_filled_from_replay(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine(topic=b"kv") as engine, sidecar(engine, nats_url, topic="kv") as publisher:
        await engine.send(*payloads[:50])
        for payload in payloads[50:60]:
            engine.lose(payload)
        await engine.send(*payloads[60:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps == publisher.counters.feed_gaps_filled == 1
        assert publisher.counters.snapshots == 1


async def test_replay_of_older_engines_has_no_topic_frame(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.11.1-array")
    async with FakeEngine(replay_topic=False) as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:20])
        engine.lose(payloads[20])
        await engine.send(*payloads[21:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps_filled == 1


async def test_a_lost_last_batch_is_seen_when_the_feed_is_silent(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:-1])
        engine.lose(payloads[-1])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps == 0


async def test_a_sidecar_that_starts_late_asks_for_what_was_before(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine:
        await engine.send(*payloads[:100])
        async with sidecar(engine, nats_url) as publisher:
            await engine.send(*payloads[100:])
            await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))


async def test_a_gap_that_cannot_be_filled_starts_over_empty(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, replay_endpoint=None) as publisher:
        await engine.send(*payloads[:50])
        engine.lose(payloads[50])
        await engine.send(*payloads[51:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads[51:]))
        assert publisher.counters.feed_started_over == 1
        assert publisher.counters.snapshots == 2


async def test_a_restarted_engine_is_told_anew(client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*first)
        await until(lambda: publisher.counters.engine_batches == len(first), what="the first life is taken")
        before = publisher.telling.outbox.incarnation
        engine.restart()
        await engine.send(*second)
        await told_equals(client, publisher, folded(EngineKind.VLLM, second))
        assert publisher.counters.feed_restarts >= 1
        assert publisher.telling.outbox.incarnation > before


async def test_bad_payloads_are_counted_kept_and_passed_over(client: Client, nats_url: str, tmp_path: Path) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
        await engine.send(*payloads[:40])
        await engine.raw(b"", engine.next_seq.to_bytes(8, "big"), b"\xc1garbage")  # a foreign sender takes our next seq
        await engine.raw(b"", engine.next_seq.to_bytes(8, "big"), payloads[40][:30])
        await engine.send(*payloads[40:80])
        await engine.raw(b"", b"short", payloads[0])
        await engine.raw(b"alone")
        await engine.raw(b"", b"\xff" * 8, payloads[0])  # the seq of a replay's end
        await engine.send(b"\x00" * 10_000_000)  # the engine's own, too large
        await engine.send(b"\x92\x01\xc1")  # the engine's own, malformed
        await engine.send(*payloads[80:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.poison == 7
        assert publisher.counters.poison_malformed == 3
        assert publisher.counters.poison_oversized == 1
        assert publisher.counters.poison_frames == 3
        assert publisher.counters.feed_started_over == 0
        assert publisher.counters.snapshots == 1
    letters = (tmp_path / "w.dead-letters.jsonl").read_text().splitlines()
    assert len(letters) == 7


async def test_a_restarted_sidecar_resumes_from_its_saved_state(client: Client, nats_url: str, tmp_path: Path) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine(buffer=60) as engine:
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await engine.send(*payloads[:150])
            await until(lambda: publisher.counters.engine_batches == 150, what="the first part is taken")
            before = publisher.telling.outbox.incarnation
        for payload in payloads[150:]:
            engine.lose(payload)
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
            assert publisher.telling.outbox.incarnation > before
            assert publisher.counters.feed_started_over == 0


async def test_the_saved_state_of_another_life_is_not_used(client: Client, nats_url: str, tmp_path: Path) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    async with FakeEngine() as engine:
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await engine.send(*first[:100])
            await until(lambda: publisher.counters.engine_batches == 100, what="the first life is taken")
        engine.restart()
        for payload in second:
            engine.lose(payload)
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await told_equals(client, publisher, folded(EngineKind.VLLM, second))


async def test_one_process_serves_several_ranks(client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("sglang-0.5.23")
    async with FakeEngine() as one, FakeEngine() as two, anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        both = [
            settings(one, nats_url, worker_id="a"),
            settings(two, nats_url, worker_id="b", engine=EngineKind.SGLANG),
        ]
        tasks.start_soon(run_sidecar, both, started.extend)
        await until(lambda: started, what="the sidecar is ready")
        await one.subscribed()
        await two.subscribed()
        await one.send(*first)
        await two.send(*second)
        by_name = {publisher.worker_id: publisher for publisher in started}
        await told_equals(client, by_name["a"], folded(EngineKind.VLLM, first))
        await told_equals(client, by_name["b"], folded(EngineKind.SGLANG, second))
        tasks.cancel_scope.cancel()
