"""The production overlay's NATS and Valkey on loopback: its configuration files, users and certificates."""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import trustme
from redis.exceptions import RedisError

from kvatlas.embedded.free_port import free_port
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from tests.deployment.tools import ROOT, objects
from tests.eventually import until_sync

FILES = ROOT / "k8s/chart/files"
PRIMARIES = 3
CREATE_SECRETS = ROOT / "k8s/production/create-secrets"


@cache
def secrets() -> dict[str, dict[str, str]]:
    """What `create-secrets` makes, by name."""
    printed = subprocess.run([CREATE_SECRETS], capture_output=True, text=True, timeout=30, check=True).stdout
    return {one["metadata"]["name"]: one["stringData"] for one in objects(printed)}


def at(url: str, scheme: str, port: int, host: str = "localhost") -> str:
    """A URL of the Secrets, with its user and password, for a server on loopback."""
    login = urlsplit(url).netloc.rpartition("@")[0]
    return urlunsplit((scheme, f"{login}@{host}:{port}", "", "", ""))


class ProductionNats(NatsProcess):
    """One server with the overlay's `nats.conf`; `places` says what stands for the pod's files and addresses."""

    def __init__(self, places: dict[str, str]) -> None:
        super().__init__()
        self._places = places

    def _command(self) -> list[str]:
        super()._command()
        text = (FILES / "nats.conf").read_text()
        own = {
            "$POD_NAME": self._server_name,
            "listen: 0.0.0.0:4222": f"listen: 127.0.0.1:{self.port}",
            "0.0.0.0:8222": f"127.0.0.1:{free_port()}",
            "/var/run/nats/nats.pid": str(self.data_dir / "nats.pid"),
            "/data": str(self.data_dir / "data"),
        }
        for words, instead in (own | self._places).items():
            assert words in text, f"nats.conf has no {words}"
            text = text.replace(words, instead)
        file = self.data_dir / "production.conf"
        file.write_text(text)
        users = self.data_dir / "users/users.conf"
        users.parent.mkdir(exist_ok=True)
        users.write_text(secrets()["kvatlas-nats-users"]["users.conf"])
        return ["--config", str(file)]


@contextmanager
def nats_cluster(folder: Path, authority: trustme.CA) -> Iterator[Sequence[NatsProcess]]:
    """Three of them, with certificates of `authority`."""
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    folder.mkdir(parents=True, exist_ok=True)
    certificate.private_key_pem.write_to_path(folder / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    ports = [free_port() for _ in range(3)]
    places = {
        "/etc/nats/tls/": f"{folder}/",
        "$ROUTES_PASSWORD": secrets()["kvatlas-nats-users"]["routes-password"],
        **{f"kvatlas-nats-{i}.kvatlas-nats:6222": f"localhost:{port}" for i, port in enumerate(ports)},
    }
    with ExitStack() as stack:
        servers = [ProductionNats({**places, "0.0.0.0:6222": f"127.0.0.1:{port}"}) for port in ports]
        for server in servers:
            server.start()
            stack.callback(server.close)
        yield servers


@contextmanager
def valkey_servers(folder: Path, count: int = 6) -> Iterator[list[ValkeyProcess]]:
    """Servers with the overlay's `valkey.conf` and users, not yet a cluster. Without TLS, which the embedded server lacks,
    and with the default user, which asks whether they are ready."""
    users = secrets()["kvatlas-valkey-users"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "users.acl").write_text(
        users["users.acl"].replace("user default off", "user default on nopass ~* &* +@all")
    )
    settings: dict[str, Any] = {
        **_directives(),
        "cluster-node-timeout": "2000",
        "aclfile": str(folder / "users.acl"),
        "primaryuser": "replica",
        "primaryauth": users["replica-password"],
        "cluster-announce-hostname": "localhost",
    }
    with ExitStack() as stack:
        servers = [ValkeyProcess(cluster=True, settings=settings) for _ in range(count)]
        for server in servers:
            server.start()
            stack.callback(server.close)
        yield servers


def _directives() -> dict[str, str]:
    """Those of `valkey.conf` that don't say where the pod's files and addresses are."""
    lines = [line for line in (FILES / "valkey.conf").read_text().splitlines() if line and not line.startswith("#")]
    found = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    own = re.compile("tls-.*|port|bind|dir|cluster-config-file|aclfile")
    return {name: value for name, value in found.items() if not own.fullmatch(name)}


def made_whole(keeper: ModuleType, valkeys: list[ValkeyProcess]) -> list[Any]:
    """Rounds of the keeper, ten a second, until nothing is left to do and every server knows all and no more."""
    credentials = secrets()["kvatlas-valkey-users"]["keeper-credentials"].replace("rediss:", "redis:")
    servers = [keeper.Server(f"127.0.0.1:{process.port}", credentials) for process in valkeys]
    due_s = 0.0

    def round_of_it() -> bool:
        nonlocal due_s
        if monotonic() < due_s:
            return False
        due_s = monotonic() + 0.1
        try:
            whole = keeper.keep(servers, PRIMARIES) == "all is well"
        except RedisError:  # a server that is just changing its role
            return False
        return bool(whole and all(len(server.seen) == len(servers) for server in servers))

    until_sync(round_of_it, what="the servers are one cluster")
    return servers
