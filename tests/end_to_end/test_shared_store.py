"""A shared store outlives its writers: from the bytes of two engines to a router's choice and an audit."""

import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import msgpack
import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.settings import PublishSettings
from kvatlas.store.connection import open_store
from kvatlas_cli.ledger_audit import Verdict, audit_workers
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from router_client import Prompt, PromptOverlap, RouterClient, RouterSettings
from tests.end_to_end.processes import service
from tests.eventually import until
from tests.http_client import http_client
from tests.publishers.fake_engine import FakeEngine
from tests.publishers.sidecars import sidecar

pytestmark = pytest.mark.anyio

SIZE = 16
TOKENS = list(range(10 * SIZE + 1))
PROMPT = Prompt.of_tokens(Scope("model", "model"), TOKENS)


def stored(salt: int, first: int, last: int, medium: str | None = None) -> list[Any]:
    """vLLM's event for these blocks of the prompt; each engine has different hashes."""
    names = [salt + n for n in range(first, last)]
    parent = salt + first - 1 if first else None
    return ["BlockStored", names, parent, TOKENS[first * SIZE : last * SIZE], SIZE, None, medium]


def batch(*events: list[Any]) -> bytes:
    return bytes(msgpack.packb([0.0, list(events), 0]))


async def test_a_stores_blocks_stay_when_their_writers_are_gone_and_go_when_it_is_cleared(
    fresh_nats: str, fresh_valkey: str, tmp_path: Path
) -> None:
    """The first writer, a process, is killed; the second continues its chain; a third worker only reads."""
    servers = ["--nats-url", fresh_nats, "--redis-url", fresh_valkey]
    port, published = free_port(), list[Publisher]()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(service("indexer", *servers, ready="is ready", cwd=tmp_path))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        settings = PublishSettings(
            engine=EngineKind.STORE, worker_id="pool", model_id="model", block_size=SIZE, store_ttl_s=600,
            read_us_per_mib=1, nats_url=fresh_nats, state_dir=tmp_path, status_port=port,
        )  # fmt: skip
        tasks.start_soon(run_sidecar, settings, published.extend)
        await until(lambda: published, what="the store is published")
        first, second, third = [await stack.enter_async_context(FakeEngine()) for _ in range(3)]
        process = await stack.enter_async_context(
            service(
                "publish", "--nats-url", fresh_nats, "--engine", "vllm", "--endpoint", first.endpoint, "--worker-id", "w1",
                "--model-id", "model", "--shared-store", "pool", ready="is published", cwd=tmp_path,
            )
        )  # fmt: skip
        fields = {"replay_endpoint": None, "block_size": SIZE, "shared_store": "pool"}
        await stack.enter_async_context(sidecar(second, fresh_nats, worker_id="w2", **fields))
        await stack.enter_async_context(sidecar(third, fresh_nats, worker_id="w3", **fields))
        router = await stack.enter_async_context(RouterClient.open(fresh_valkey, RouterSettings(deadline_ms=None)))

        async def overlap() -> PromptOverlap:
            return await router.overlap(PROMPT)

        async def held(worker_id: str) -> int:
            found = (await overlap()).of(worker_id)
            return 0 if found is None else found.resident_blocks

        async def is_held(worker_id: str, blocks: int) -> bool:
            return await held(worker_id) == blocks

        await first.subscribed()
        await first.send(
            batch(stored(1_000, 0, 6)), batch(stored(1_000, 0, 6, "cpu"))
        )  # as Mooncake's connector reports it
        await until(lambda: is_held("pool", 6), what="the first writer's blocks are in the store")
        await until(lambda: is_held("w1", 6), what="and in its own cache")

        process.send_signal(signal.SIGKILL)
        await process.wait()
        store = await open_store(fresh_valkey, wait=False)
        stack.push_async_callback(store.close)
        index = await open_redis_index(store, writer=False)
        record = await index.record("w1")
        assert record is not None and await index.retire("w1", record.incarnation)  # as indexers do after a minute
        assert (await held("w1"), await held("pool")) == (0, 6)

        # the second engine read the first one's blocks, and wrote more after them
        await second.send(batch(stored(2_000, 0, 9)), batch(stored(2_000, 6, 9, "MOONCAKE")))
        await until(lambda: is_held("pool", 9), what="the second writer's blocks are in the store")
        await until(lambda: is_held("w2", 9), what="and in its own cache")

        ranking = {one.worker_id: one for one in await router.rank(PROMPT)}
        reader = ranking["w3"]
        assert (reader.usable_tokens, reader.transferred_tokens) == (0, 9 * SIZE)
        assert (reader.source, reader.source_kind) == ("pool", "store")
        assert ranking["w2"].source is None and "pool" not in ranking
        found = (await overlap()).of("pool")
        assert found is not None and (found.kind, found.routable) == ("store", False)

        records = await router.workers(PROMPT.scope)
        assert records["pool"].endpoint.is_store and not records["pool"].routable
        nats = await connect_nats(fresh_nats, name="test")
        stack.push_async_callback(nats.close)
        (audited,) = await audit_workers(index, nats, ["pool"], deadline_s=20)
        assert (audited.verdict, audited.blocks) == (Verdict.EQUAL, 9)
        chain = extend_chain(TOKENS, SIZE)
        assert (await index.overlap(PROMPT.scope, chain, verify=True)).differences == ()

        async with http_client(base_url=f"http://127.0.0.1:{port}") as page:
            assert (await page.post("/clear")).is_success
        await until(lambda: is_held("pool", 0), what="the cleared store is empty")
        assert await held("w2") == 9
        await second.send(batch(stored(2_000, 0, 2, "MOONCAKE")))
        await until(lambda: is_held("pool", 2), what="what is stored again is held again")
