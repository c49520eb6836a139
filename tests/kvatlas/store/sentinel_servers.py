"""A primary, its replica and three Sentinels on loopback; with TLS if there are certificates."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from kvatlas.embedded.binaries import valkey_server_binary
from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.embedded.server_process import ServerProcess
from tests.eventually import until_sync

NAME = "atlas"
"""The Sentinels' name for the primary."""
PASSWORD = "of-the-servers"
SENTINEL_PASSWORD = "of-sentinels"


@dataclass(frozen=True, slots=True)
class Files:
    """PEM files; all servers and clients share the certificate."""

    ca: Path
    certificate: Path
    key: Path


class WatchedServer(ServerProcess):
    """A server, or a Sentinel, with a password and these lines in its configuration file."""

    name = "redis-server"

    def __init__(self, binary: Path, password: str, lines: Sequence[str], files: Files | None, *words: str) -> None:
        super().__init__(binary, port=0, data_dir=None, start_deadline_s=30)
        self._password = password
        self._lines = lines
        self._files = files
        self._words = words

    @property
    def url(self) -> str:
        return f"{'redis' if self._files is None else 'rediss'}://:{self._password}@{LOOPBACK}:{self.port}"

    def command(self, *parts: str | int) -> Any:
        """Raises RedisError."""
        files = self._files
        tls: dict[str, Any] = {}
        if files is not None:
            tls = {"ssl": True, "ssl_ca_certs": files.ca, "ssl_certfile": files.certificate, "ssl_keyfile": files.key}
        client: Any = redis.Redis(
            LOOPBACK, self.port, password=self._password, socket_timeout=2, retry=Retry(NoBackoff(), 0), **tls
        )
        with closing(client):
            return client.execute_command(*parts)

    def _command(self) -> list[str]:
        lines = [f"bind {LOOPBACK}", f"dir {self.data_dir}", f"requirepass {self._password}", *self._lines]
        lines += [f"port {self.port}"] if self._files is None else ["port 0", f"tls-port {self.port}"]
        if self._files is not None:
            lines += ["tls-replication yes", f"tls-ca-cert-file {self._files.ca}"]
            lines += [f"tls-cert-file {self._files.certificate}", f"tls-key-file {self._files.key}"]
        file = self.data_dir / "server.conf"
        if not file.exists():  # both kinds keep what they have learned in it
            file.write_text("\n".join(lines) + "\n")
        return [str(file), *self._words]

    def _is_ready(self) -> bool:
        try:
            return bool(self.command("INFO")["process_id"] == self.pid)
        except RedisError:
            return False


@dataclass(frozen=True, slots=True)
class WatchedPair:
    """Two servers, one of them the other's replica, and their Sentinels."""

    servers: Sequence[WatchedServer]
    sentinels: Sequence[WatchedServer]

    def url(self, scheme: str = "redis+sentinel") -> str:
        """The URL for kvatlas, with the passwords of servers and Sentinels."""
        places = ",".join(f"{LOOPBACK}:{one.port}" for one in self.sentinels)
        return f"{scheme}://:{PASSWORD}@{places}/{NAME}?sentinel_password={SENTINEL_PASSWORD}"

    @property
    def primary(self) -> WatchedServer:
        """The primary according to the first running Sentinel."""
        sentinel = next(one for one in self.sentinels if one.is_running)
        _, port = sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return next(one for one in self.servers if one.port == int(port))


@contextmanager
def watched_pair(binary: Path | None = None, files: Files | None = None) -> Iterator[WatchedPair]:
    """A pair whose Sentinels declare a server lost after one second; they have met each other, and know the replica."""
    binary = binary or valkey_server_binary()
    common = ['save ""', f"masterauth {PASSWORD}", "maxmemory-policy noeviction", "repl-diskless-sync-delay 0"]
    with ExitStack() as stack:

        def started(password: str, lines: Sequence[str], *words: str) -> WatchedServer:
            server = stack.enter_context(WatchedServer(binary, password, lines, files, *words))
            return server

        first = started(PASSWORD, common)
        second = started(PASSWORD, [*common, f"replicaof {LOOPBACK} {first.port}"])
        watch = [
            f"sentinel monitor {NAME} {LOOPBACK} {first.port} 2",
            f"sentinel auth-pass {NAME} {PASSWORD}",
            f"sentinel down-after-milliseconds {NAME} 1000",
            f"sentinel failover-timeout {NAME} 5000",
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}",
        ]
        sentinels = [started(SENTINEL_PASSWORD, watch, "--sentinel") for _ in range(3)]

        def met() -> bool:
            states = [_texts(one.command("SENTINEL", "MASTER", NAME)) for one in sentinels]
            return all(state["num-other-sentinels"] == "2" and state["num-slaves"] == "1" for state in states)

        until_sync(met, what="the Sentinels know each other and the replica")
        until_sync(lambda: second.command("INFO")["master_link_status"] == "up", what="the replica follows")
        yield WatchedPair([first, second], sentinels)


def _texts(fields: Any) -> dict[str, str]:
    """An answer of Sentinel: a map, or a flat list of names and values."""
    pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
    return {_text(name): _text(value) for name, value in pairs}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
