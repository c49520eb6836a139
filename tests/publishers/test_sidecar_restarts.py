"""Restarts of engines and sidecars, noticed and unnoticed."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.bus.subjects import alive_subject
from kvatlas.fleet.records import EngineKind, EngineState, Heartbeat
from kvatlas.settings import PublishSettings
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.publishers.engines.engine_http import engine_http
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.published_stream import read_stream
from tests.publishers.sidecars import assert_published, ledger_of, settings, sidecar

pytestmark = pytest.mark.anyio


async def test_a_restarted_engine_begins_a_new_incarnation(nats_client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*first)
        await until(
            lambda: publisher.counters.engine_batches == len(first), what="the first process' batches are taken"
        )
        before = publisher.changelog.outbox.incarnation
        engine.restart()
        await engine.send(*second)
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, second))
        assert publisher.counters.feed_restarts >= 1
        assert publisher.changelog.outbox.incarnation > before


async def test_a_restarted_sidecar_resumes_from_its_saved_state(
    nats_client: Client, nats_url: str, tmp_path: Path
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine(buffer=60) as engine:
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await engine.send(*payloads[:150])
            await until(lambda: publisher.counters.engine_batches == 150, what="the first part is taken")
            before = publisher.changelog.outbox.incarnation
        for payload in payloads[150:]:
            engine.lose(payload)
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
            assert publisher.changelog.outbox.incarnation > before
            assert publisher.counters.feed_started_over == 0


async def test_the_saved_state_of_another_engine_process_is_not_used(
    nats_client: Client, nats_url: str, tmp_path: Path
) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    async with FakeEngine() as engine:
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await engine.send(*first[:100])
            await until(lambda: publisher.counters.engine_batches == 100, what="the first process' batches are taken")
        engine.restart()
        for payload in second:
            engine.lose(payload)
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, second))


async def test_an_engine_that_goes_away_is_down_and_its_blocks_stay_published(
    nats_client: Client, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, payloads = recording("vllm-0.33.0")
    alive = await nats_client.subscribe(alive_subject("w"))

    async def state() -> EngineState:
        return Heartbeat.unpack((await alive.next_msg(timeout=60)).data).state

    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        async with FakeEngine() as engine:
            tasks.start_soon(run_sidecar, settings(engine, nats_url), started.extend)
            await until(lambda: started, what="the sidecar is ready")
            await engine.subscribed()
            await engine.send(*payloads)
            await assert_published(nats_client, started[0], ledger_of(EngineKind.VLLM, payloads))
            await until(lambda: _is(state, EngineState.UP), what="a heartbeat that says up")
        await until(lambda: _is(state, EngineState.DOWN), what="a heartbeat that says down")
        await until(lambda: any("is not connected" in line for line in caplog.messages), what="a line that says why")
        assert started[0].ledger.digest == ledger_of(EngineKind.VLLM, payloads).digest
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def sidecar_over_restarts(
    fields: dict[str, Any], nats_url: str
) -> AsyncIterator[Callable[[], Awaitable[Publisher]]]:
    """A sidecar that outlives its engine. Yields a function that starts it with the settings `fields`."""
    async with anyio.create_task_group() as tasks:

        async def start() -> Publisher:
            started: list[Publisher] = []
            tasks.start_soon(
                run_sidecar,
                PublishSettings(worker_id="w", model_id="model", nats_url=nats_url, **fields),
                started.extend,
            )
            await until(lambda: started, what="the sidecar is ready")
            return started[0]

        yield start
        tasks.cancel_scope.cancel()


async def test_another_process_whose_seq_follows_ours_is_noticed_although_the_engine_is_never_silent(
    nats_client: Client, nats_url: str
) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    fields: dict[str, Any] = {"engine": EngineKind.VLLM}
    async with sidecar_over_restarts(fields, nats_url) as start:
        async with FakeEngine() as engine:
            fields |= {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
            publisher = await start()
            await engine.subscribed()
            await engine.send(*first[:40])
            await until(lambda: publisher.counters.engine_batches == 40, what="the first process' batches are taken")
        async with FakeEngine(ports=engine.ports) as engine:
            for payload in second[:40]:
                engine.lose(payload)
            await engine.subscribed()
            sent = second[:40]

            async def restart_noticed() -> bool:
                payload = second[min(len(sent), len(second) - 1)]  # never silent, or a probe would find out
                await engine.send(payload)
                sent.append(payload)
                return publisher.counters.feed_restarts == 1

            await until(restart_noticed, what="the restart is noticed")
            left = second[len(sent) :]
            await engine.send(*left)
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, sent + left))


async def test_without_replay_a_lost_connection_drops_everything_held(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    fields: dict[str, Any] = {"engine": EngineKind.VLLM}
    async with sidecar_over_restarts(fields, nats_url) as start:
        async with FakeEngine() as engine:
            fields |= {"endpoint": engine.endpoint}
            publisher = await start()
            await engine.subscribed()
            await engine.send(*payloads)
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
        async with FakeEngine(ports=engine.ports):  # another process that sends nothing
            await until(lambda: not publisher.ledger.digest.blocks, what="nothing is announced")


async def _is(state: Callable[[], Awaitable[EngineState]], wanted: EngineState) -> bool:
    return await state() is wanted


async def test_another_process_start_time_is_a_restart_of_the_feed(nats_client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, "process_start_time_seconds 1000.5\n")}
        async with FakeEngine() as engine, sidecar(engine, nats_url, engine_url=http.url) as publisher:
            assert publisher.engine.state is EngineState.UP
            await engine.send(*first[:100])
            await until(lambda: publisher.counters.engine_batches == 100, what="the first process' batches are taken")
            engine.restart()
            for payload in second:  # none of them is received: only the start time shows the restart
                engine.lose(payload)
            http.pages["/metrics"] = (200, "process_start_time_seconds 2000.5\n")
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, second))
            assert publisher.counters.feed_restarts >= 1


async def test_a_saved_state_with_another_process_start_time_is_not_used(
    nats_client: Client, nats_url: str, tmp_path: Path
) -> None:
    _, payloads = recording("vllm-0.33.0")
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, "process_start_time_seconds 1000.5\n")}
        async with FakeEngine() as engine:
            fields = {"engine_url": http.url, "state_dir": tmp_path, "replay_endpoint": engine.replay_endpoint}
            async with sidecar(engine, nats_url, **fields) as publisher:
                await engine.send(*payloads)
                await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
            engine.restart()
            http.pages["/metrics"] = (200, "process_start_time_seconds 2000.5\n")
            async with sidecar(engine, nats_url, **fields) as publisher:
                await until(lambda: publisher.changelog.outbox.acked_seq >= 0, what="the new incarnation is published")
                assert publisher.ledger.digest.blocks == 0


TOKENS = list(range(64))
AWAKE = "process_start_time_seconds 1000.5\n"
ASLEEP = f'{AWAKE}vllm:engine_sleep_state{{sleep_state="awake"}} 0\n'


def models(root: str) -> tuple[int, str]:
    """vLLM's model list while its adapter is loaded from this path."""
    return 200, json.dumps({"data": [{"id": "model", "root": "model"}, {"id": "sql", "root": root, "parent": "model"}]})


def weights(version: str) -> tuple[int, str]:
    return 200, json.dumps({"weight_version": version})


def stored(first: int, **fields: Any) -> bytes:
    """A batch with four vLLM blocks whose hashes count up from `first`."""
    event = {"type": "BlockStored", "block_hashes": list(range(first, first + 4)), "parent_block_hash": None}
    return msgpack.packb([1.0, [{**event, "token_ids": TOKENS, "block_size": 16, **fields}], None])


@pytest.mark.parametrize(
    ("changed", "left"),
    [
        ({}, 8),
        ({"/v1/models": models("/b")}, 4),
        ({"/weight_info": weights("v2")}, 0),
        ({"/metrics": (200, ASLEEP)}, 0),
    ],
    ids=["nothing", "adapter", "weights", "sleep"],
)
async def test_what_an_engine_dropped_while_its_publisher_was_away_is_not_claimed(
    changed: dict[str, tuple[int, str]], left: int, nats_client: Client, nats_url: str, tmp_path: Path
) -> None:
    """Even if the feed's next batch, which comes from replay, is older than the change."""
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, AWAKE), "/v1/models": models("/a")}
        http.pages["/weight_info"] = weights("v1")
        async with FakeEngine() as engine:
            fields = {"engine_url": http.url, "state_dir": tmp_path}
            async with sidecar(engine, nats_url, **fields) as publisher:
                await engine.send(stored(1))
                await until(lambda: publisher.ledger.announced_blocks == 4, what="the model's blocks are taken")
            engine.lose(stored(11, lora_name="sql"))
            http.pages |= changed
            async with sidecar(engine, nats_url, **fields) as publisher:
                await until(lambda: publisher.changelog.outbox.acked_seq >= 0, what="the new incarnation is published")
                await publisher.flush()
                assert publisher.counters.engine_batches >= 1 and publisher.counters.feed_started_over == 0
                assert publisher.ledger.announced_blocks == left
                assert await (await read_stream(nats_client)).residencies("w") == left


async def test_an_adapter_and_weights_that_change_while_it_runs_are_not_claimed(
    nats_client: Client, nats_url: str
) -> None:
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, AWAKE), "/v1/models": models("/a")}
        http.pages["/weight_info"] = weights("v1")
        async with FakeEngine() as engine, sidecar(engine, nats_url, engine_url=http.url) as publisher:
            await engine.send(stored(1), stored(11, lora_name="sql"))
            await until(lambda: publisher.ledger.announced_blocks == 8, what="all blocks are taken")
            http.pages["/v1/models"] = models("/b")
            await until(lambda: publisher.ledger.announced_blocks == 4, what="the adapter's are dropped")
            http.pages["/weight_info"] = weights("v2")
            await until(lambda: publisher.ledger.announced_blocks == 0, what="the model's are dropped")
