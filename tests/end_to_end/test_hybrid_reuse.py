"""What vLLM 0.33's own KV cache manager reused of each prompt of its recordings is what a router finds usable, from the
engine's bytes through ledger, wire and store."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.reuse import CacheReading
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import open_store
from publishers.publisher import Publisher
from publishers.settings import PublisherSettings
from router_client import Prompt, RouterClient
from tests.end_to_end.processes import service
from tests.end_to_end.socketless_worker import SocketlessWorker
from tests.eventually import until
from tests.publishers.fake_engine import FakeEngine
from tests.publishers.hybrid_recordings import (
    FILES,
    FOLDER,
    Ask,
    Batch,
    HybridRecording,
    Repoint,
    read_hybrid_recording,
)
from tests.publishers.sidecars import sidecar

pytestmark = pytest.mark.anyio

MODEL = "hybrid"


def settings_of(recording: HybridRecording) -> PublisherSettings:
    """With what no event tells."""
    chunks = [int(group.partition(":")[2]) for group in recording.groups if group.startswith("chunked")]
    eagle = recording.eagle or recording.lookahead > 0
    return PublisherSettings(worker_id="w", model_id=MODEL, chunk_size=max(chunks, default=0), eagle=eagle)


def prompt_of(ask: Ask, model: str = MODEL) -> Prompt:
    reading = CacheReading(skip=True) if ask.skip else CacheReading()
    return Prompt.of_tokens(Scope(model, model, ask.adapter), ask.tokens, reading=reading)


async def differences(index: ResidencyIndex, worker: SocketlessWorker, ask: Ask) -> Sequence[tuple[str, int, int]]:
    size = worker.ledger.block_size or 16
    chain = extend_chain(ask.tokens, size)
    limit = (len(ask.tokens) - 1) // size
    return (await index.overlap(prompt_of(ask).scope, chain, limit=limit, verify=True)).differences


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
async def test_a_router_finds_usable_what_the_engine_reuses(path: Path, fresh_valkey: str) -> None:
    recording = read_hybrid_recording(path)
    store = await open_store(fresh_valkey, wait=False)
    try:
        index = await open_redis_index(store, writer=True)
        worker = SocketlessWorker(settings_of(recording), index)
        await worker.send()
        predicted, real = [], []
        for i, step in enumerate(recording.steps):
            if isinstance(step, Batch):
                await worker.take(step.payload)
            elif isinstance(step, Repoint):
                await worker.forget_adapter("adapter-1")
            else:
                real.append(step.hit)
                predicted.append(await worker.usable_tokens(prompt_of(step)))
                if i % 10 == 0:
                    assert await differences(index, worker, step) == ()
        await worker.check()
        assert predicted == real
        assert any(real)
    finally:
        await store.close()


async def test_over_zmq_nats_and_an_indexer_a_router_finds_usable_what_the_engines_reuse(
    fresh_nats: str, fresh_valkey: str, tmp_path: Path
) -> None:
    """Three hybrid engines at once; each prompt is asked when the index and the router know all that came before it."""
    names = ("swa-mamba", "chunked512", "offload-mamba-first")
    servers = ["--nats-url", fresh_nats, "--redis-url", fresh_valkey]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(service("indexer", *servers, ready="is ready", cwd=tmp_path))
        router = await stack.enter_async_context(RouterClient.open(fresh_valkey))
        store = await open_store(fresh_valkey, wait=False)
        stack.push_async_callback(store.close)
        index = await open_redis_index(store, writer=False)
        results: dict[str, list[tuple[int, int]]] = {}

        async def run(name: str, engine: FakeEngine, publisher: Publisher) -> None:
            recording = read_hybrid_recording(FOLDER / f"{name}.jsonl.gz")

            def has_recorded(batches: int) -> bool:
                return publisher.counters.engine_batches >= batches

            async def is_applied() -> bool:
                record, sent = await index.record(name), publisher.changelog.outbox
                return record is not None and (record.incarnation, record.seq) == (sent.incarnation, sent.acked_seq)

            async def is_known() -> bool:
                record = (await router.workers(Scope(f"model-{name}", f"model-{name}"))).get(name)
                known = publisher.settings.endpoint(publisher.block_size, publisher.ledger.reuse)
                return record is not None and record.endpoint == known

            sent = 0
            found: list[tuple[int, int]] = []
            for step in recording.steps:
                if isinstance(step, Batch):
                    await engine.send(step.payload)
                    sent += 1
                elif isinstance(step, Ask):
                    if len(found) == 20:
                        break
                    await until(partial(has_recorded, sent), what="all batches recorded")
                    await publisher.flush()
                    await until(is_applied, what="the index has all")
                    await until(is_known, what="the router knows the worker's groups")
                    mine = (await router.overlap(prompt_of(step, f"model-{name}"))).of(name)
                    found.append((mine.usable_tokens if mine is not None else 0, step.hit))
            results[name] = found

        workers = {}
        for name in names:
            engine = await stack.enter_async_context(FakeEngine())
            settings = settings_of(read_hybrid_recording(FOLDER / f"{name}.jsonl.gz"))
            fields = {"worker_id": name, "model_id": f"model-{name}", "chunk_size": settings.chunk_size}
            workers[name] = engine, await stack.enter_async_context(sidecar(engine, fresh_nats, **fields))
        async with anyio.create_task_group() as tasks:
            for name, (engine, publisher) in workers.items():
                tasks.start_soon(run, name, engine, publisher)
        for name in names:
            assert [usable for usable, _ in results[name]] == [hit for _, hit in results[name]], name
            assert any(hit for _, hit in results[name])
