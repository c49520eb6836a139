"""NATS and a store that know only the users that `kvatlas auth` writes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.store.access import RedisAccess
from kvatlas_cli import main

PUBLISHERS = """
[publishers.chat]
workers = ["chat-{0..1}", "w"]
models = ["mock-model"]
tenants = ["default", "acme"]
addresses = ["127.0.0.1"]

[publishers.code]
workers = ["code"]
models = ["mock-model"]
tenants = ["code"]
addresses = ["127.0.0.1"]
"""


def write(*words: str) -> None:
    """`kvatlas auth ...`, which must succeed."""
    assert main.run(["auth", *words]) == 0


@dataclass(frozen=True, slots=True)
class GuardedServers:
    """`folder` has what `kvatlas auth` wrote."""

    folder: Path
    nats: NatsProcess
    store: ValkeyProcess

    @property
    def identities(self) -> Path:
        return self.folder / "identities.json"

    def nats_url(self, user: str) -> str:
        return (self.folder / f"{user}.nats-url").read_text().strip()

    def redis_url(self, user: str) -> str:
        return (self.folder / f"{user}.redis-url").read_text().strip()

    def flags(self, user: str) -> dict[str, Any]:
        """Settings of a process that is this user of both servers, or of the one that knows the user."""
        files = {f"{kind}_url_file": self.folder / f"{user}.{kind}-url" for kind in ("nats", "redis")}
        return {name: file for name, file in files.items() if file.exists()}

    @asynccontextmanager
    async def connected(self, user: str) -> AsyncIterator[tuple[Client, list[str]]]:
        """A connection as this user, and the server's refusals."""
        async with connected(NatsAccess(self.nats_url(user))) as opened:
            yield opened


@asynccontextmanager
async def connected(access: NatsAccess) -> AsyncIterator[tuple[Client, list[str]]]:
    """A connection, and the server's refusals."""
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error).lower())

    client = await connect_nats(access, name="test", wait=False)
    client._error_cb = note
    try:
        yield client, refused
    finally:
        await client.close()


@contextmanager
def guarded_servers(folder: Path, publishers: str = PUBLISHERS) -> Iterator[GuardedServers]:
    """Both servers; the store's default user may do everything, because readiness is checked as that user."""
    folder.mkdir(exist_ok=True)
    (folder / "fleet.toml").write_text(publishers)
    out = folder / "auth"
    write("nats", "--out", str(out), "--publishers", str(folder / "fleet.toml"))
    write("redis", "--out", str(out))
    acl = folder / "users.acl"
    acl.write_text((out / "users.acl").read_text().replace("default off", "default on nopass ~* &* +@all"))
    with (
        NatsProcess(config=(out / "nats-users.conf").read_text()) as nats,
        ValkeyProcess(settings={"aclfile": str(acl)}) as store,
    ):
        # when run again, it keeps the secrets, and writes where the servers are now
        write("nats", "--out", str(out), "--publishers", str(folder / "fleet.toml"), "--nats-url", nats.url)
        write("redis", "--out", str(out), "--redis-url", store.url)
        yield GuardedServers(out, nats, store)


def redis_access(servers: GuardedServers, user: str) -> RedisAccess:
    return RedisAccess(servers.redis_url(user))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedServers]:
    with guarded_servers(tmp_path_factory.mktemp("guarded")) as started:
        yield started
