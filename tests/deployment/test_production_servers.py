"""A fleet on the production overlay's own servers: three NATS with TLS, a Valkey cluster, users that may do what they must."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import trustme
from nats.aio.client import Client
from redis import Redis
from redis.exceptions import NoPermissionError

from kvatlas.bus.connection import connect_nats
from kvatlas.embedded.free_port import free_port
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas_cli.auth.nats_users import nats_permissions
from kvatlas_cli.auth.redis_users import redis_users
from tests.deployment.production_servers import at, made_whole, nats_cluster, secrets
from tests.end_to_end.processes import query, service
from tests.eventually import until
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

FLAGS = ["--shards=4", "--stream-replicas=3", "--stream-storage=file", "--stream-max-bytes=268435456"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[NatsProcess]]:
    """Three NATS servers whose certificates this process and its children trust as pods do, by SSL_CERT_FILE."""
    folder, authority = tmp_path_factory.mktemp("nats"), trustme.CA()
    with nats_cluster(folder, authority) as servers, pytest.MonkeyPatch.context() as environment:
        environment.setenv("SSL_CERT_FILE", str(folder / "ca.crt"))
        yield servers


@pytest.fixture(scope="module")
def cluster(keeper: ModuleType, valkeys: list[ValkeyProcess]) -> list[ValkeyProcess]:
    made_whole(keeper, valkeys)
    return valkeys


def nats_url(servers: Sequence[NatsProcess], role: str) -> str:
    return at(secrets()[f"kvatlas-{role}"]["KVATLAS_NATS_URL"], "tls", servers[0].port)


def redis_url(cluster: list[ValkeyProcess], role: str) -> str:
    return at(secrets()[f"kvatlas-{role}"]["KVATLAS_REDIS_URL"], "redis+cluster", cluster[0].port)


@asynccontextmanager
async def connected(servers: Sequence[NatsProcess], role: str) -> AsyncIterator[Client]:
    client = await connect_nats(nats_url(servers, role), name="test", wait=False)
    try:
        yield client
    finally:
        await client.close()


async def test_a_request_finds_its_prefix_and_every_part_is_somebody(
    servers: Sequence[NatsProcess], cluster: list[ValkeyProcess], tmp_path: Path
) -> None:
    port = free_port()
    indexer = ["--nats-url", nats_url(servers, "indexer"), "--redis-url", redis_url(cluster, "indexer")]
    async with (
        running_engine(model="m", speed_up=100.0) as (engine, _),
        service("indexer", *FLAGS, *indexer, ready="is ready", cwd=tmp_path),
        service(
            *("publish", "--engine=vllm", "--worker-id=w", "--model-id=m"),
            *("--endpoint", engine.endpoint, "--replay-endpoint", engine.replay_endpoint or ""),
            *("--engine-url", engine.base_url, "--nats-url", nats_url(servers, "publisher")),
            ready="is published",
            cwd=tmp_path,
        ),
        service(
            *("router", "--port", str(port), "--redis-url", redis_url(cluster, "router")),
            "--decision-deadline-ms=2000",
            ready="router at",
            cwd=tmp_path,
        ),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as router,
    ):

        async def found() -> bool:
            body = {"model": "m", "prompt": list(range(200)), "max_tokens": 2}
            answer = await router.post("/v1/completions", json=body)
            seen = answer.headers.get("x-kvatlas-decision", "")
            return "by=cost" in seen and "cached=0" not in seen and "unconfirmed" not in seen

        await until(found, what="a choice by what the index holds")
        async with connected(servers, "indexer") as client:
            stream = await client.jetstream().stream_info("KVATLAS_EVENTS")
            assert stream.config.num_replicas == 3 and stream.config.storage == "file"
        findings = json.loads(await query("doctor", "--json", *indexer))
        assert [one for one in findings if one["level"] == "error"] == []


async def test_a_publisher_may_not_touch_the_stream(
    servers: Sequence[NatsProcess], cluster: list[ValkeyProcess]
) -> None:
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    async with connected(servers, "publisher") as publisher:
        publisher._error_cb = note
        await publisher.publish("$JS.API.STREAM.DELETE.KVATLAS_EVENTS", b"")
        await until(lambda: refused, what="the refusal")
    assert "permissions violation" in refused[0].lower()


@pytest.mark.parametrize(
    "words",
    [
        ["SET", "kva:x", "1"],
        ["DEL", "kva:x"],
        ["FLUSHALL"],
        ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"],
        ["SHUTDOWN"],
        ["GET", "other"],
        ["CLUSTER", "RESET"],
    ],
)
def test_a_router_may_not_change_the_index(valkeys: list[ValkeyProcess], words: list[str]) -> None:
    url = at(secrets()["kvatlas-router"]["KVATLAS_REDIS_URL"], "redis", valkeys[0].port)
    with Redis.from_url(url) as router, pytest.raises(NoPermissionError):
        router.execute_command(*words)


def test_the_overlay_gives_each_user_what_kvatlas_auth_gives_it() -> None:
    conf = secrets()["kvatlas-nats-users"]["users.conf"]
    conf = "\n".join(line.strip() for line in conf.splitlines())
    for user, permissions in nats_permissions().items():
        after = conf.partition(f'user: {user}, password: "')[2]
        assert after.partition("permissions: {\n")[2].startswith(permissions.render()), user
    acl = secrets()["kvatlas-valkey-users"]["users.acl"]
    for user, rules in redis_users().items():
        (line,) = [line for line in acl.splitlines() if line.startswith(f"user {user} ")]
        assert line.split(" ", 4)[4] == rules, user
