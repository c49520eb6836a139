"""A fleet of processes on a Redis server that Sentinel watches and whose primary dies."""

import json
from pathlib import Path

import pytest

from kvatlas.embedded.free_port import free_port
from tests.end_to_end.processes import query, service
from tests.eventually import until
from tests.http_client import http_client
from tests.kvatlas.store.sentinel_servers import watched_pair
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio


async def test_requests_find_their_prefixes_again_after_the_primary_died(fresh_nats: str, tmp_path: Path) -> None:
    port = free_port()
    with watched_pair() as pair:
        nats, redis = ["--nats-url", fresh_nats], ["--redis-url", pair.url()]
        async with (
            running_engine(model="m", speed_up=100.0) as (engine, _),
            service("indexer", *nats, *redis, ready="is ready", cwd=tmp_path),
            service(
                *("publish", "--engine=vllm", "--worker-id=w", "--model-id=m", *nats),
                *("--endpoint", engine.endpoint, "--replay-endpoint", engine.replay_endpoint or ""),
                *("--engine-url", engine.base_url),
                ready="is published",
                cwd=tmp_path,
            ),
            service(
                "router", "--port", str(port), *redis, "--decision-deadline-ms=2000", ready="router at", cwd=tmp_path
            ),
            http_client(base_url=f"http://127.0.0.1:{port}", timeout=60) as router,
        ):

            async def found(first: int) -> bool:
                body = {"model": "m", "prompt": list(range(first, first + 200)), "max_tokens": 2}
                answer = await router.post("/v1/completions", json=body)
                assert answer.status_code == 200
                seen = answer.headers.get("x-kvatlas-decision", "")
                return "by=cost" in seen and "cached=0" not in seen and "unconfirmed" not in seen

            await until(lambda: found(0), what="a choice by what the index holds")
            first = pair.primary
            first.kill()
            await until(lambda: pair.primary is not first, what="another primary")
            await until(lambda: found(0), what="the same, from the new primary")
            await until(lambda: found(5_000), what="blocks that the engine has had only since then")

            async def healthy() -> bool:
                findings = json.loads(await query("doctor", "--json", *nats, *redis))
                return not [one for one in findings if one["level"] == "error"]

            await until(healthy, what="the doctor finds no error")
