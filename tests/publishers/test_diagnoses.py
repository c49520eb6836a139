"""Sidecars with a setting that does not match the engine or the fleet say so once, with the cure."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.bus.subjects import alive_subject
from kvatlas.fleet.records import Diagnosis, EngineKind, Heartbeat
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.indexer.running_replica import running_replica
from tests.publishers.engines.engine_http import engine_http
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.sidecars import settings, sidecar

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def running_sidecar(fake: FakeEngine, nats_url: str, **fields: Any) -> AsyncIterator[Publisher]:
    """A sidecar that may not be connected to the engine."""
    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        tasks.start_soon(run_sidecar, settings(fake, nats_url, **fields), started.extend)
        await until(lambda: started, what="the sidecar is ready")
        yield started[0]
        tasks.cancel_scope.cancel()


async def diagnosed(publisher: Publisher) -> Diagnosis:
    """The only problem that the publisher finds."""
    [found] = await until(lambda: publisher.diagnoses.current, what="something is wrong")
    assert publisher.status()["diagnoses"] == [found.model_dump()]
    return found


async def test_a_wrong_topic_is_named_with_or_without_replay(
    nats_client: Client, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with (
        FakeEngine(topic=b"kv-events") as engine,
        sidecar(engine, nats_url, topic="kv@w", replay_endpoint=None) as publisher,
    ):
        for payload in payloads[:5]:
            await engine.send(payload)
        found = await diagnosed(publisher)
        assert found.seen.startswith("the engine publishes under topic 'kv-events', but --topic is 'kv@w'")
        assert found.cure == "set --topic 'kv-events'"
        await engine.send(payloads[5])
        assert publisher.counters.engine_batches == 0
        await engine.raw(b"kv@w", (0).to_bytes(8, "big"), payloads[0])
        await until(lambda: not publisher.diagnoses.current, what="the right topic is heard")
        await until(lambda: publisher.counters.engine_batches == 1, what="its batch is taken")
    assert sum("set --topic" in line for line in caplog.messages) == 1


async def test_an_event_socket_that_brings_nothing_while_replay_does_is_named(
    nats_client: Client, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with (
        FakeEngine() as engine,
        FakeEngine() as other,
        sidecar(other, nats_url, replay_endpoint=engine.replay_endpoint) as publisher,
    ):
        await until(lambda: len(engine.replays) >= 2, what="replay is asked when the socket is connected")
        for payload in payloads[:5]:
            engine.lose(payload)
        found = await diagnosed(publisher)
        assert found.seen.startswith(f"event socket {other.endpoint} delivers no events")
        assert f"replay socket {engine.replay_endpoint} does" in found.seen
        assert "--endpoint" in found.cure
        assert publisher.counters.engine_batches == 5
    assert sum("delivers no events" in line for line in caplog.messages) == 1


async def test_an_address_where_no_event_socket_listens_is_named(nats_client: Client, nats_url: str) -> None:
    async with (
        FakeEngine() as engine,
        running_sidecar(engine, nats_url, endpoint=engine.replay_endpoint) as publisher,
    ):
        found = await diagnosed(publisher)
        assert found.seen.startswith(f"replay socket {engine.replay_endpoint} answers, but event socket")
        assert found.seen.endswith("the socket there is not an event socket")
        assert publisher.engine.state.value == "down"


async def test_another_data_parallel_rank_is_named_and_not_published(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(msgpack.packb([1.0, [], 2]))
        await until(lambda: publisher.counters.engine_batches == 1, what="the feed's rank is heard")
        await engine.send(*payloads[:5])
        found = await diagnosed(publisher)
        assert found.seen == "the feed has batches of data-parallel rank 0, but the worker is rank 2: they are ignored"
        assert found.cure == "set --dp-rank 0, or --endpoint to the socket of rank 2"
        assert publisher.counters.feed_unheard == 5 and publisher.ledger.announced_blocks == 0


@pytest.mark.parametrize(("size", "why"), [(32, ""), (8, " (context parallelism multiplies an engine's block size)")])
async def test_another_block_size_is_named(nats_client: Client, nats_url: str, size: int, why: str) -> None:
    head, payloads = recording("vllm-0.33.0")
    assert head["block_size"] == 16
    async with FakeEngine() as engine, sidecar(engine, nats_url, block_size=size) as publisher:
        await engine.send(*payloads[:20])
        found = await diagnosed(publisher)
        line = f"the engine's blocks have 16 tokens, but --block-size is {size}: none of them is published"
        assert (found.name, found.seen, found.cure) == (
            "block_size",
            line,
            f"set --block-size 16, or leave it out{why}",
        )


@pytest.mark.parametrize(
    ("name", "kind", "right"),
    [
        ("vllm-0.22.0-array", EngineKind.SGLANG, "vllm"),
        ("vllm-0.33.0", EngineKind.SGLANG, "vllm"),
        ("sglang-0.5.23", EngineKind.VLLM, "sglang"),
    ],
)
async def test_another_engine_is_recognized_by_its_events(
    nats_client: Client, nats_url: str, name: str, kind: EngineKind, right: str
) -> None:
    _, payloads = recording(name)
    async with FakeEngine() as engine, sidecar(engine, nats_url, engine=kind) as publisher:
        await engine.send(*payloads)
        found = await diagnosed(publisher)
        assert found.seen == f"the feed at {engine.endpoint} is {right}'s, but --engine is {kind.value}"
        assert found.cure == f"set --engine {right}"


async def test_another_engine_is_recognized_by_its_metrics(nats_client: Client, nats_url: str) -> None:
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, "# HELP\nsglang:num_running_reqs 1\n")}
        async with FakeEngine() as engine, sidecar(engine, nats_url, engine_url=http.url) as publisher:
            found = await diagnosed(publisher)
            assert found.seen == f"the metrics page at {http.url[:-1]} is sglang's, but --engine is vllm"


async def test_other_partitions_than_the_indexers_are_named(
    nats_client: Client, nats_url: str, fresh_valkey: str
) -> None:
    _, payloads = recording("vllm-0.33.0")
    heard: list[Heartbeat] = []

    async def on_heartbeat(msg: Any) -> None:
        heard.append(Heartbeat.unpack(msg.data))

    await nats_client.subscribe(alive_subject("w"), cb=on_heartbeat)
    async with (
        running_replica(nats_url, fresh_valkey),
        FakeEngine() as engine,
        sidecar(engine, nats_url, partitions=32) as publisher,
    ):
        await engine.send(*payloads[:20])
        found = await diagnosed(publisher)
        assert found.seen == "the indexers have 64 partitions, but --partitions is 32: they refuse every message"
        assert found.cure == "set --partitions 64"
        await until(lambda: heard and list(heard[-1].diagnoses) == [found], what="heartbeats tell it")
        assert publisher.counters.snapshots == 1  # another incarnation would also be refused


async def test_nothing_is_wrong_with_the_right_settings_and_the_first_event_is_told(
    nats_client: Client, nats_url: str, fresh_valkey: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvatlas.publisher")
    _, payloads = recording("vllm-0.33.0")
    async with (
        FakeEngine(topic=b"kv") as engine,
        sidecar(engine, nats_url, topic="kv", block_size=16) as publisher,
    ):
        await engine.send(*payloads)
        await until(lambda: publisher.counters.engine_batches == len(payloads), what="all batches are taken")
        await until(lambda: len(engine.replays) >= 3, what="the feed was silent for a while")
        assert not publisher.diagnoses.current
        line = f"worker w: receiving events from {engine.endpoint}, from seq 0"
        assert caplog.messages.count(line) == 1


async def test_heartbeats_that_are_none_are_told_once_and_counted(
    nats_client: Client, nats_url: str, fresh_valkey: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        FakeEngine() as engine,
        running_replica(nats_url, fresh_valkey) as replica,
        sidecar(engine, nats_url) as own,
    ):
        for _ in range(10_000):
            await nats_client.publish(alive_subject("w"), b"\x80")
        counted = replica.counters
        await until(
            lambda: counted.heartbeats_bad + counted.heartbeats_excess >= 10_000, what="the indexer counts them"
        )
        assert counted.heartbeats_bad and counted.heartbeats_excess
        await until(lambda: own.counters.heartbeats_bad == 10_000, what="the sidecar counts them")
    lines = [line for line in caplog.messages if "invalid heartbeat on kvatlas.alive.w" in line]
    assert 2 <= len(lines) <= 4
    assert "check what else publishes there" in lines[0] + lines[1]


def stored(name: int, parent: int | None, token: int, **changed: Any) -> dict[str, Any]:
    fields = {"block_hashes": [name], "parent_block_hash": parent, "token_ids": [token] * 16, "block_size": 16}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", **changed}


def one_batch(*events: dict[str, Any]) -> bytes:
    return msgpack.packb([1.0, list(events), 0])


@pytest.mark.parametrize(
    ("changed", "reason", "seen"),
    [
        ({"parent_block_hash": 999}, "unknown_parent", "their parent block is unknown"),
        ({"parent_block_hash": 0}, "zero_parent", "they name 0 as their parent"),
        ({"token_ids": [1 << 40] * 16}, "unindexable", "their token ids exceed 32 bits"),
        ({"lora_id": 7}, "adapter_unnamed", "adapters that the engine reports by id only"),
        ({"medium": "cpu"}, "removal_untold", "no event reports their removal"),
        ({"block_size": "x"}, "unreadable_events", "events can't be read; the last one: BlockStored with block_size"),
    ],
)
async def test_a_feed_of_which_nothing_counts_is_named_with_its_reason(
    nats_client: Client,
    nats_url: str,
    caplog: pytest.LogCaptureFixture,
    changed: dict[str, Any],
    reason: str,
    seen: str,
) -> None:
    async with FakeEngine() as engine, sidecar(engine, nats_url, replay_endpoint=None) as publisher:
        await engine.send(*(one_batch(stored(at, None, at, **changed)) for at in range(1, 41)))
        found = await diagnosed(publisher)
        assert (found.name, publisher.ledger.digest.blocks) == ("left_out", 0)
        assert found.seen.startswith("events arrive, but none of them is published: ") and seen in found.seen
        assert publisher.status()["intake"]["left_out"] == {reason: 40}
        assert publisher.gauges().left_out == 1.0
        await engine.send(*(one_batch(stored(at, None, at, **changed)) for at in range(41, 81)))
        await until(lambda: publisher.gauges().left_out == 1.0, what="it is judged again")
    assert sum("events arrive, but none of them is published" in line for line in caplog.messages) == 1, (
        "it is logged once"
    )


async def test_a_late_join_without_replay_heals_once_the_cache_is_reset(nats_client: Client, nats_url: str) -> None:
    async with FakeEngine() as engine, sidecar(engine, nats_url, replay_endpoint=None) as publisher:
        await engine.send(*(one_batch(stored(at, at - 1, at)) for at in range(100, 140)))
        found = await diagnosed(publisher)
        assert "/reset_prefix_cache" in found.cure
        await engine.send(one_batch({"type": "AllBlocksCleared"}))
        await engine.send(*(one_batch(stored(at, at - 1 if at > 200 else None, at)) for at in range(200, 210)))
        await until(lambda: publisher.ledger.digest.blocks == 10, what="what it stores then is published")
        await until(lambda: not publisher.diagnoses.current, what="nothing is wrong any more")


async def test_an_engine_that_serves_and_tells_nothing_is_named(nats_client: Client, nats_url: str) -> None:
    with engine_http() as http:
        http.pages["/health"] = (200, "")
        async with FakeEngine() as engine, sidecar(engine, nats_url, engine_url=http.url) as publisher:
            served = {"total": 0}

            async def serve() -> bool:
                served["total"] += 500
                page = f"vllm:num_requests_running 0.0\nvllm:prompt_tokens_total {served['total']}\n"
                http.pages["/metrics"] = (200, page)
                return bool(publisher.diagnoses.current)

            await until(serve, what="it is seen")
            found = await diagnosed(publisher)
            assert found.seen.startswith("the engine serves requests, but nothing is published: no event")
            assert "--enable-prefix-caching" in found.cure


async def test_holes_that_come_again_and_again_are_named(nats_client: Client, nats_url: str) -> None:
    async with FakeEngine() as engine, sidecar(engine, nats_url, replay_endpoint=None) as publisher:
        for at in range(1, 6):
            await engine.send(one_batch(stored(at, None, at)))
            engine.next_seq += 1
        found = await diagnosed(publisher)
        assert "batches are lost repeatedly" in found.seen and "--replay-endpoint" in found.cure
