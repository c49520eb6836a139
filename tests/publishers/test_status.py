"""The status page of a publisher, and a worker that drains."""

import re
import socket
from contextlib import suppress

import anyio
import httpx
import pytest
from nats.aio.client import Client

from kvatlas.blocks.tiers import Tier
from kvatlas.embedded import nats_server
from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import EngineKind, EngineState, Heartbeat
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.http_client import http_client
from tests.kvatlas.status_page.page_text import texts
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.published_stream import read_stream
from tests.publishers.sidecars import assert_published, ledger_of, settings, sidecar

pytestmark = pytest.mark.anyio


async def test_the_page_answers_while_nats_is_away_and_is_ready_when_the_worker_is_published() -> None:
    port, nats_port = free_port(), free_port()
    async with FakeEngine() as engine, http_client(base_url=f"http://127.0.0.1:{port}") as page:

        async def answers(path: str) -> bool:
            with suppress(httpx.TransportError):
                return (await page.get(path)).is_success
            return False

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_sidecar, settings(engine, f"nats://127.0.0.1:{nats_port}", status_port=port))
            await until(lambda: answers("/healthz"), what="the page answers")
            waiting = await page.get("/readyz")
            assert (waiting.status_code, waiting.text) == (503, "not ready: 0 of 1 workers are published\n")
            assert await says(page, "0 of 1 .* no worker is published yet")
            async with nats_server(port=nats_port):
                await until(lambda: answers("/readyz"), what="the worker is published")
                (worker,) = (await page.get("/status")).json()["workers"]
                assert worker["worker_id"] == "w"
                await until(
                    lambda: says(page, r"w \| up \| model \| 0 \|"), what="the worker is on the page for people"
                )
                await until(lambda: says(page, r"\| [\d.]+ s ago: publisher start \|"), what="and its first snapshot")
                tasks.cancel_scope.cancel()
    with socket.create_server(("127.0.0.1", port)):
        pass  # nothing listens there any longer


async def says(page: httpx.AsyncClient, pattern: str) -> bool:
    answer = await page.get("/")
    return answer.status_code == 200 and re.search(pattern, texts(answer.text)) is not None


async def test_a_draining_worker_says_so_and_is_published_on(nats_client: Client, nats_url: str) -> None:
    beats = await nats_client.subscribe("kvatlas.alive.w")
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        publisher.drain()
        with anyio.fail_after(60):
            while Heartbeat.unpack((await beats.next_msg(5)).data).state is not EngineState.DRAINING:
                pass
        await engine.send(*payloads)
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))


async def test_known_blocks_are_dropped_on_request_before_the_engine_says_so(
    nats_client: Client, nats_url: str
) -> None:
    """An engine whose cache was reset reports that only with its next batch."""
    port = free_port()
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, status_port=port) as publisher:
        await engine.send(*payloads[:40])
        await until(lambda: publisher.ledger.announced_blocks, what="blocks are held")
        await until(lambda: publisher.counters.engine_batches == 40, what="all batches are taken")
        async with http_client(base_url=f"http://127.0.0.1:{port}") as page:
            assert (await page.get("/clear")).status_code == 405
            assert (await page.post("/clear")).text == "1 workers: all known blocks are dropped\n"
        assert publisher.ledger.announced_blocks == 0
        await publisher.flush()
        published = await read_stream(nats_client)
        assert await published.index.digest("w") == publisher.ledger.digest_words


async def test_the_page_shows_blocks_by_tier_and_what_is_wrong_with_its_cure(
    nats_client: Client, nats_url: str
) -> None:
    port = free_port()
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, status_port=port) as publisher:
        await engine.send(*payloads[:40])
        await until(lambda: publisher.counters.engine_batches == 40, what="all batches are taken")
        await publisher.flush()
        publisher.diagnoses.set("topic", "the engine's topic is 'kv'", "set --topic kv")
        blocks = publisher.ledger.digest.count(Tier.HBM)
        async with http_client(base_url=f"http://127.0.0.1:{port}") as page:
            await until(lambda: says(page, rf"w \| up \| model \| {blocks:,} hbm"), what="its blocks are shown")
            assert await says(page, "w: the engine's topic is 'kv'. set --topic kv.")


async def test_an_engine_that_is_down_does_not_drain(nats_url: str) -> None:
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        publisher.engine._feed_alive = lambda: False
        publisher.drain()
        assert publisher.engine.state is EngineState.DOWN
