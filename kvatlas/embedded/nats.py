"""An embedded NATS server with JetStream."""

import json
import secrets
import socket
from pathlib import Path
from urllib.parse import quote

from kvatlas.embedded.binaries import nats_server_binary
from kvatlas.embedded.free_port import LOOPBACK
from kvatlas.embedded.server_process import EmbeddedServerError, ServerProcess

MIB = 1 << 20
_PROBE_TIMEOUT_S = 1.0


class NatsProcess(ServerProcess):
    """`nats-server` on loopback.

    `max_file_store_bytes` and `max_memory_store_bytes` limit what its streams may reserve in files and in memory; NATS' own
    defaults would reserve most of the disk and of the memory. Give both `user` and `password`, or neither. `config` is appended
    to its configuration file (in NATS' own syntax), e.g. to add users with permissions.
    """

    name = "nats-server"

    def __init__(
        self,
        *,
        port: int = 0,
        data_dir: Path | None = None,
        binary: Path | None = None,
        max_file_store_bytes: int = 4096 * MIB,
        max_memory_store_bytes: int = 2048 * MIB,
        user: str | None = None,
        password: str | None = None,
        config: str = "",
        start_deadline_s: float = 30.0,
    ) -> None:
        super().__init__(
            binary or nats_server_binary(), port=port, data_dir=data_dir, start_deadline_s=start_deadline_s
        )
        for part in (user, password):
            if part is not None and quote(part, safe="") != part:  # nats-py does not decode the URL
                raise EmbeddedServerError(
                    "nats-server: user and password may hold only characters that a URL keeps as is"
                )
        if (user is None) != (password is None):
            raise EmbeddedServerError("nats-server: user and password go together")
        self._max_file_store_bytes = max_file_store_bytes
        self._max_memory_store_bytes = max_memory_store_bytes
        self._user = user
        self._password = password
        self._config = config
        self._server_name = f"kvatlas-{secrets.token_hex(6)}"

    @property
    def url(self) -> str:
        login = "" if self._user is None else f"{self._user}:{self._password}@"
        return f"nats://{login}{LOOPBACK}:{self.port}"

    def _command(self) -> list[str]:
        # NATS' configuration is a superset of JSON, so JSON quoting works for any directory or password.
        settings: dict[str, object] = {
            "server_name": self._server_name,
            "listen": f"{LOOPBACK}:{self.port}",
            "jetstream": {
                "store_dir": str(self.data_dir.resolve()),
                "max_file_store": self._max_file_store_bytes,
                "max_memory_store": self._max_memory_store_bytes,
            },
        }
        if self._user is not None:
            settings["authorization"] = {"user": self._user, "password": self._password}
        lines = [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
        file = self.data_dir / "nats.conf"
        file.touch(mode=0o600)
        file.write_text("\n".join([*lines, self._config, ""]))
        return ["--config", str(file.resolve())]

    def _is_ready(self) -> bool:
        # The greeting (INFO, before any login) states the server's name, so another server on this port is not mistaken for
        # this one.
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=_PROBE_TIMEOUT_S) as connection:
                greeting = connection.makefile("rb").readline()
        except OSError:
            return False
        if not greeting.startswith(b"INFO "):
            return False
        try:
            info = json.loads(greeting[5:])
        except ValueError:
            return False
        return bool(info.get("server_name") == self._server_name and info.get("jetstream"))
