"""An embedded Valkey (or Redis) server."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from kvatlas.embedded.binaries import valkey_server_binary
from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.embedded.server_process import ServerProcess

_PROBE_TIMEOUT_S = 1.0


class ValkeyProcess(ServerProcess):
    """`valkey-server`, or any redis-server given as `binary`, on loopback.

    It never evicts (`noeviction`), keeps small hashes compact (`hash-max-listpack-entries 128`) and saves nothing unless
    `appendonly` is set; with `appendonly`, an acknowledged write survives a crash of the process. `max_memory_bytes` 0: no
    limit. `settings` are additional directives for its configuration file; they override those above.
    """

    name = "valkey-server"

    def __init__(
        self,
        *,
        port: int = 0,
        data_dir: Path | None = None,
        binary: Path | None = None,
        password: str | None = None,
        appendonly: bool = False,
        max_memory_bytes: int = 0,
        settings: Mapping[str, str] = MappingProxyType({}),
        start_deadline_s: float = 30.0,
    ) -> None:
        chosen = binary or valkey_server_binary()
        self.name = chosen.name
        super().__init__(chosen, port=port, data_dir=data_dir, start_deadline_s=start_deadline_s)
        self._password = password
        self._appendonly = appendonly
        self._max_memory_bytes = max_memory_bytes
        self._settings = settings

    @property
    def url(self) -> str:
        login = "" if self._password is None else f":{quote(self._password, safe='')}@"
        return f"redis://{login}{LOOPBACK}:{self.port}"

    def command(self, *parts: str | int | bytes) -> Any:
        """Run one command over a new connection (blocking) and return the answer. Raises RedisError."""
        client: Any = redis.Redis(
            host=LOOPBACK,
            port=self.port,
            password=self._password,
            socket_timeout=_PROBE_TIMEOUT_S,
            socket_connect_timeout=_PROBE_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )
        with closing(client):
            return client.execute_command(*parts)

    def _command(self) -> list[str]:
        directives = {
            "bind": LOOPBACK,
            "port": str(self.port),
            "dir": _quoted(str(self.data_dir.resolve())),
            "daemonize": "no",
            "save": '""',
            "appendonly": "yes" if self._appendonly else "no",
            # The write is handed to the operating system before it is acknowledged, so nothing is lost when the server is
            # killed.
            "appendfsync": "everysec",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
            "hash-max-listpack-entries": "128",
        }
        if self._password is not None:
            directives["requirepass"] = _quoted(self._password)
        file = self.data_dir / "valkey.conf"
        file.touch(mode=0o600)  # it may hold a password, which is why the settings are not passed as arguments
        file.write_text("".join(f"{key} {value}\n" for key, value in (directives | dict(self._settings)).items()))
        return [str(file.resolve())]

    def _is_ready(self) -> bool:
        try:
            info = self.command("INFO")
        except RedisError:  # not listening, still loading its data, or a different server with a different password
            return False
        # another server on the port may have answered although ours is gone; `pid` would then raise
        return bool(self._popen is not None and info["process_id"] == self._popen.pid and info["loading"] == 0)


def _quoted(value: str) -> str:
    """A string, in the syntax of Redis' configuration files."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
