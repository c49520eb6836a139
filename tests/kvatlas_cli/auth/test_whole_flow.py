"""Publisher, indexer, router, doctor and audit, each as its own user, on servers that have no other users."""

import anyio
import pytest

from kvatlas.bus.connection import connect_nats
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.settings import DoctorSettings, PublishSettings, Settings
from kvatlas.store.connection import open_store
from kvatlas_cli.doctor import Finding, Level, examine
from kvatlas_cli.ledger_audit import audit_workers
from kvatlas_publishers.sidecar import run_sidecar
from router_client import Prompt, RouterClient, RouterSettings
from tests.eventually import until
from tests.http_client import http_client
from tests.indexer.running_replica import running_replica
from tests.kvatlas_cli.auth.guarded_servers import GuardedServers
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

TOKENS = list(range(1000, 1200))
PROMPT = Prompt.of_tokens(Scope("mock-model", "mock-model"), TOKENS)
BLOCKS = len(TOKENS) // 4


async def test_every_part_does_its_work_as_its_own_user(servers: GuardedServers) -> None:
    indexer = Settings.load(**servers.flags("indexer"))
    auditor = DoctorSettings.load(**servers.flags("auditor"), identities=servers.identities)
    async with (
        running_replica(indexer.nats_url, indexer.redis_url, identities=servers.identities) as replica,
        running_engine() as (engine, _),
        anyio.create_task_group() as tasks,
    ):
        sidecar = PublishSettings.load(
            **servers.flags("chat"),
            engine="vllm",
            endpoint=engine.endpoint,
            replay_endpoint=engine.replay_endpoint,
            worker_id="chat-0",
            model_id="mock-model",
            engine_url=engine.base_url,
        )
        tasks.start_soon(run_sidecar, sidecar)
        async with http_client(base_url=engine.base_url, timeout=60) as http:
            body = {"model": "mock-model", "prompt": TOKENS, "max_tokens": 2}
            (await http.post("/v1/completions", json=body)).raise_for_status()
        router_settings = RouterSettings(deadline_ms=None)
        async with RouterClient.open(servers.redis_url("router"), router_settings, wait=False) as router:

            async def holds_the_prompt() -> bool:
                found = await router.overlap(PROMPT)
                return any(one.resident_blocks == BLOCKS for one in found)

            await until(holds_the_prompt, what="the engine's blocks are in the index")
            async with router.route(PROMPT) as choice:
                assert (choice.worker_id, choice.url, choice.mode) == ("chat-0", engine.base_url, "cost")
        store = await open_store(auditor.redis, wait=False)
        client = await connect_nats(auditor.nats, name="audit", wait=False)
        try:
            index = await open_redis_index(store, writer=False)
            (audited,) = await audit_workers(index, client, ["chat-0"], 10)
            assert audited.verdict.good and audited.blocks
        finally:
            await client.close()
            await store.close()
        found: list[Finding] = await examine(auditor.nats, auditor.redis, listen_s=1.2)
        assert [one for one in found if one.level is Level.ERROR] == []
        assert replica.counters.heartbeats_refused == replica.counters.poison == 0
        refused = {(one[b"username"], one[b"object"]) for one in servers.store.command("ACL", "LOG")}
        assert refused <= {(b"auditor", b"fcall")}  # an auditor may not mark the functions as used
        tasks.cancel_scope.cancel()
