"""An engine without KV events, from `kvatlas up` to the answers: its cache is predicted, and marked as predicted."""

import json
from pathlib import Path

import anyio
import pytest

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.store.connection import open_store
from router_client import Prompt, RouterClient, RouterSettings
from tests.end_to_end.processes import query, service
from tests.eventually import until
from tests.router.proxy.engines import MODEL, running_proxy
from tests.router.proxy.test_proxy import decision
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

PROMPT = [*range(1_000, 1_385)]
"""12 steps of 8 blocks of 4 tokens, plus one token."""
BODY = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2}


async def test_the_cache_of_an_eventless_engine_is_predicted_and_marked(
    fresh_nats: str, fresh_valkey: str, tmp_path: Path
) -> None:
    servers = ["--nats-url", fresh_nats, "--redis-url", fresh_valkey]
    store = await open_store(fresh_valkey, wait=False)
    scope = Scope(MODEL, MODEL)

    async def is_routable() -> bool:
        return any(record.routable for record in (await FleetStore(store).all()).values())

    async with anyio.create_task_group() as tasks:
        stop, stopped = anyio.Event(), anyio.Event()
        urls: list[str] = []

        async def engine() -> None:
            async with running_engine(events=False, num_gpu_blocks=512) as (addresses, _):
                urls.append(addresses.base_url)
                await stop.wait()
            stopped.set()

        tasks.start_soon(engine)
        (url,) = await until(lambda: urls, what="the engine answers")
        async with service("up", *servers, "--engine", url, ready="no events", cwd=tmp_path):
            await until(is_routable, what="the engine's worker is known")
            settings = RouterSettings(deadline_ms=None)
            async with running_proxy(fresh_valkey) as client, RouterClient.open(fresh_valkey, settings) as router:
                worker_id, fields = decision(await client.post("/v1/completions", json=BODY))
                assert (fields["cached"], fields["by"]) == ("0", "cost")
                answer = await client.post("/v1/completions", json=BODY)
                _, fields = decision(answer)
                assert (fields["cached"], fields["unconfirmed"]) == ("384", "384")
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 384

                prompt = Prompt.of_tokens(scope, PROMPT)
                (found,) = await router.overlap(prompt)
                assert (found.resident_tokens, found.usable_tokens, found.predicted_tokens) == (0, 0, 384)
                assert "384 tokens predicted (its engine publishes no events)" in found.explain()
                (ranked,) = await router.rank(prompt)
                assert (ranked.usable_tokens, ranked.predicted_tokens) == (0, 384)
                async with router.route(prompt) as choice:
                    assert (choice.predicted_cached_tokens, choice.unconfirmed_tokens) == (384, 384)
                    assert "384 more predicted" in choice.explain()
                (tmp_path / "prompt.json").write_text(json.dumps(PROMPT))
                args = ["--model-id", MODEL, "--tokens", str(tmp_path / "prompt.json")]
                output = await query("overlap", *servers, *args)
                assert "384 predicted (engine without events)" in output

                # after a restart the engine's cache is empty
                port = int(url.rpartition(":")[2])
                stop.set()
                await stopped.wait()
                async with running_engine(events=False, num_gpu_blocks=512, port=port):

                    async def is_dropped() -> bool:
                        (again,) = await router.overlap(prompt)
                        return again.worker_id == worker_id and again.routable and not again.predicted_tokens

                    await until(is_dropped, what="predictions are dropped after the engine's restart")
    await store.close()
