"""Each open event form, from an engine's bytes to the index and back, next to a vLLM worker, with publishers killed in
between."""

import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.blocks.external_chain import external_chain, hash_text
from kvatlas.blocks.hashing import extend_chain, local_hash, unpack_hashes
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas.settings import IndexerSettings
from kvatlas_indexer.service import run_indexer
from kvatlas_publishers.feed.open_batches import OpenBatches
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from router_client import Fallbacks, Prompt, RequestHints, RouterClient, RouterSettings
from tests.end_to_end.processes import ROOT, query, service
from tests.eventually import until
from tests.http_client import http_client
from tests.publishers.fake_engine import FakeEngine
from tests.publishers.sidecars import sidecar

pytestmark = pytest.mark.anyio


@pytest.fixture
async def nats_client(fresh_nats: str) -> AsyncIterator[Client]:
    client = await connect_nats(fresh_nats, name="test")
    yield client
    await client.close()


VLLM, ROUTER, HTTP = list(range(100, 116)), list(range(200, 216)), list(range(300, 316))
TEXTS = ["block a", "block b", "block c"]
MOST = (1 << 64) - 1


def vllm_batch() -> bytes:
    event = {"type": "BlockStored", "block_hashes": [1, 2, 3, 4], "token_ids": VLLM, "block_size": 4}
    return bytes(msgpack.packb([1.0, [event], None]))


def router_batch() -> bytes:
    locals_ = [local_hash(ROUTER[at : at + 4]) for at in range(0, 16, 4)]
    blocks = [{"block_hash": MOST - at, "tokens_hash": one} for at, one in enumerate(locals_)]
    events = [
        {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks[:2]}}},
        {"event_id": 1, "data": {"stored": {"parent_hash": -2, "blocks": blocks[2:]}}},  # MOST - 1, signed
        {"event_id": 2, "data": {"removed": {"block_hashes": [MOST - 3]}}},
    ]
    return json.dumps({"events": events, "shutdown": False}).encode()


def engine_batch(**stored: Any) -> bytes:
    return json.dumps({"engine_id": "e", "events": [{"type": "block_stored", **stored}]}).encode() + b"\n"


TEXT_BATCH = engine_batch(block_hashes=TEXTS, block_size=64)
HTTP_BATCH = engine_batch(block_hashes=["x", 7, "y", MOST], token_ids=HTTP, block_size=4, bytes_per_block=1 << 20)
LOAD = {"request_active_slots": 2, "request_total_slots": 8, "kv_active_blocks": 4, "kv_total_blocks": 64}


class Publishers:
    """The publisher processes of the three forms, until they are killed."""

    def __init__(self, nats_url: str, router_engine: FakeEngine, http_port: int, folder: Path) -> None:
        self._engine, self._port, self._text_port = router_engine, http_port, free_port()
        self._nats_url, self._folder = nats_url, folder

    @asynccontextmanager
    async def running(self) -> AsyncIterator[dict[str, Process]]:
        started: dict[str, Process] = {}
        sockets = ["--endpoint", self._engine.endpoint, "--replay-endpoint", self._engine.replay_endpoint]
        stop = anyio.Event()

        async def run(worker: str, *flags: str) -> None:
            args = ["publish", "--engine", "open", "--nats-url", self._nats_url, "--worker-id", worker, *flags]
            one = service(*args, "--model-id", "m", ready="is published", cwd=self._folder)
            async with one as started[worker]:
                await stop.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: run("w-text", "--status-port", str(self._text_port)))
            tasks.start_soon(lambda: run("w-router", *sockets, "--block-size", "4"))
            tasks.start_soon(lambda: run("w-http", "--status-port", str(self._port)))
            await until(lambda: len(started) == 3, what="the publishers run")
            async with http_client(base_url=f"http://127.0.0.1:{self._text_port}") as page:
                assert (await page.post("/events", content=TEXT_BATCH)).status_code == 200
            async with http_client(base_url=f"http://127.0.0.1:{self._port}") as page:
                answer = await page.post("/events", content=HTTP_BATCH)
                assert (answer.status_code, answer.json()["events"], answer.json()["skipped"]) == (200, 1, [])
                load = json.dumps({"engine_id": "e", "events": [], "load": LOAD}).encode()
                assert (await page.post("/events?worker=w-http", content=load)).status_code == 200
                assert (await page.post("/events", content=b"{}")).status_code == 400
                assert (await page.post("/events?worker=w", content=load)).status_code == 404
            yield started
            stop.set()


async def test_each_form_is_found_by_its_own_kind_of_question_also_after_its_publisher_was_killed(
    fresh_nats: str, fresh_valkey: str, tmp_path: Path
) -> None:
    servers = ["--nats-url", fresh_nats, "--redis-url", fresh_valkey]
    indexer = IndexerSettings.load(nats_url=fresh_nats, redis_url=fresh_valkey, stream_storage="memory")
    scope, fallbacks = Scope("m", "m"), Fallbacks("m")
    external = RequestHints.parse({"block_hashes": [*TEXTS, "block d"]})
    prompts = {
        "w-vllm": Prompt.of_tokens(scope, [*VLLM, 0]),
        "w-router": Prompt.of_tokens(scope, [*ROUTER, 0]),
        "w-http": Prompt.of_tokens(scope, [*HTTP, 0]),
        "w-text": Prompt.of_hints(external, fallbacks),
    }
    expected = {"w-vllm": 4, "w-router": 3, "w-http": 4, "w-text": 3}
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        ready = anyio.Event()
        tasks.start_soon(lambda: run_indexer(indexer, ready=lambda _: ready.set()))
        await ready.wait()
        vllm, router_engine = [await stack.enter_async_context(FakeEngine()) for _ in range(2)]
        router = await stack.enter_async_context(
            RouterClient.open(fresh_valkey, RouterSettings(fallbacks=fallbacks, deadline_ms=None))
        )
        await stack.enter_async_context(sidecar(vllm, fresh_nats, worker_id="w-vllm", model_id="m"))
        await vllm.send(vllm_batch())
        await router_engine.send(router_batch())  # no subscriber hears it, but replay has it

        async def found(prompt: Prompt) -> dict[str, int]:
            return {one.worker_id: one.resident_blocks for one in await router.overlap(prompt) if one.resident_blocks}

        async def each_finds_its_own() -> bool:
            return all([await found(prompts[one]) == {one: blocks} for one, blocks in expected.items()])

        publishers = Publishers(fresh_nats, router_engine, free_port(), tmp_path)
        async with publishers.running() as processes:
            await until(each_finds_its_own, what="each form is found")
            for process in processes.values():
                process.send_signal(signal.SIGKILL)
        async with publishers.running() as processes:
            await until(each_finds_its_own, what="each form is found again")

            async def load_is_known() -> bool:
                load = (await router.workers(scope))["w-http"].load
                return load is not None and load.forward_pass.total_request_slots == 8

            await until(load_is_known, what="the load is known")
            record = (await router.workers(scope))["w-text"].endpoint
            assert (record.chain, record.block_size) == ("external:default", 64)
            lines = [json.loads(line) for line in (await query("export", *servers)).splitlines()]
            keys = {(line["worker"], line["chain"], line["sequence_hash"]) for line in lines}
            assert keys == {
                *(("w-vllm", "own", hash_text(key)) for key in unpack_hashes(extend_chain(VLLM, 4))),
                *(("w-router", "own", hash_text(key)) for key in unpack_hashes(extend_chain(ROUTER[:12], 4))),
                *(("w-http", "own", hash_text(key)) for key in unpack_hashes(extend_chain(HTTP, 4))),
                *(("w-text", "external:default", hash_text(key)) for key in unpack_hashes(external_chain(TEXTS))),
            }
            assert {line["bytes"] for line in lines if line["worker"] == "w-http"} == {1 << 20}
            hints = tmp_path / "hints.json"
            hints.write_text(json.dumps({"block_hashes": TEXTS, "model_id": "m", "colour": "red"}))
            answer = json.loads(await query("overlap", *servers, "--hints", str(hints), "--json"))
            by_worker = {worker["worker"]: worker for worker in answer["workers"]}
            assert {id: one["resident_blocks"] for id, one in by_worker.items()} == dict.fromkeys(expected, 0) | {
                "w-text": 3
            }
            assert "keyed by chain own: the request's block hashes of chain external" in by_worker["w-vllm"]["why"]
            assert answer["remarks"] == ["unknown request field 'colour' ignored"]


async def test_the_example_engine_tells_exactly_what_it_holds(nats_client: Client) -> None:
    heads = [list(range(topic * 1_000, topic * 1_000 + 4_096)) for topic in range(6)]
    prompts = [head[:end] for head in heads for end in (100, 4_096)] + [heads[0][:160]]  # space for 4 of these heads
    lines = "".join(f"{json.dumps(prompt)}\n" for prompt in prompts)
    example = await anyio.run_process([sys.executable, str(ROOT / "examples" / "open_engine.py")], input=lines.encode())
    settings = PublisherSettings(worker_id="w", model_id="m", engine=EngineKind.OPEN)
    async with Publisher(settings, nats=nats_client, begin=False) as publisher:
        batches = OpenBatches(publisher)
        for line in example.stdout.splitlines():
            assert not batches.take(line).skipped
        publisher.settle()
        held = {value for _, _, _, value in publisher.ledger.announced()}
    kept = [heads[0][:160], heads[5], heads[4], heads[3]]
    expected = {key for prompt in kept for key in unpack_hashes(extend_chain(prompt, 16))}
    rest = unpack_hashes(extend_chain(heads[2], 16))[: 1_024 - len(expected)]  # evicted from the end
    assert (len(held), held) == (1_024, expected | set(rest))
