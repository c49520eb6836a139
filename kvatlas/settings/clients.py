"""Settings of every server that has clients of several tenants and a separate port for operators."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from kvatlas.addresses import is_loopback
from kvatlas.errors import SettingsError
from kvatlas.http.access import HttpAccess
from kvatlas.settings.field_types import Name, Port
from kvatlas.settings.http import HttpSettings, read_tokens
from kvatlas.settings.process import HelpGroups

CONTROL_AFTER = 1_000
"""The offset from a server's port to the port for its operators."""


class ClientSettings(HttpSettings):
    """Access of clients, and the operators' port."""

    help_groups: ClassVar[HelpGroups] = {
        "Clients": "clients_file",
        "Operators": "control_host control_port control_token_file",
    }

    host: Name = Field(default="127.0.0.1", description="Address to listen on.")
    port: Port = Field(description="Port to listen on; 0: any free port.")
    control_host: Name = Field(
        default="127.0.0.1",
        description="Address of the port for operators: /kvatlas/*, /status, /metrics, the status page.",
    )
    control_port: Port | None = Field(
        default=None,
        description="Port for operators; 0: any free port. Default: --port plus 1,000, or --port itself on "
        "loopback without token files, --clients-file and --cors-origins.",
    )
    control_token_file: Path | None = Field(
        default=None,
        description="File with the bearer tokens of the port for operators, one per line. Default: --http-token-file.",
    )
    clients_file: Path | None = Field(
        default=None,
        description="TOML file of the clients that may use this server, with their keys or certificates, tenants "
        "and limits. Default: every client may use it, and there is one tenant.",
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `HttpSettings.load`. The operators' token file must be readable too."""
        settings = super().load(**flags)
        _ = settings.control_http  # raises
        if settings.clients_file is not None and settings.http_token_file is not None:
            raise SettingsError("--clients-file and --http-token-file are both given; set only one of them")
        return settings

    @property
    def control_is_apart(self) -> bool:
        """True if operators' calls have a port of their own. On loopback, that would not protect anything."""
        given = (self.control_port, self.control_token_file, self.http_token_file, self.clients_file)
        return any(one is not None for one in given) or not is_loopback(self.host)

    @property
    def http(self) -> HttpAccess:
        """See `HttpSettings.http`."""
        return replace(super().http, gated=self.clients_file is not None)

    @property
    def control_http(self) -> HttpAccess:
        """Access to the port for operators."""
        file = self.control_token_file
        tokens = super().http.tokens if file is None else read_tokens(file, "--control-token-file")
        return replace(super().http, tokens=tokens)

    @property
    def control_at(self) -> int:
        """The number of the port for operators."""
        after = self.port + CONTROL_AFTER
        return self.control_port if self.control_port is not None else after if self.port and after < 65_536 else 0
