"""Settings of every process that has an HTTP server: a router, or a status page."""

import re
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field

from kvatlas.errors import SettingsError
from kvatlas.http.access import HttpAccess
from kvatlas.settings.process import HelpGroups, ProcessSettings, read_secret
from kvatlas.validation import Positive

_DEFAULT = HttpAccess()


class HttpSettings(ProcessSettings):
    """Limits, certificate and tokens of the HTTP server."""

    help_groups: ClassVar[HelpGroups] = {
        "HTTP server": "http_body_bytes http_body_s http_keep_alive_s http_connections http_address_connections "
        "http_cert_file http_key_file http_client_ca_file http_token_file",
    }

    http_body_bytes: Positive = Field(
        default=_DEFAULT.body_bytes, description="Largest request body in bytes; a larger one gets a 413."
    )
    http_body_s: float = Field(
        default=_DEFAULT.body_s,
        gt=0,
        description="Seconds that a request's body may take; a slower one gets a 408, as does one below 2 KiB a second.",
    )
    http_keep_alive_s: Positive = Field(
        default=_DEFAULT.idle_s,
        description="Seconds that an idle connection stays open; longer than clients and balancers keep theirs.",
    )
    http_connections: Positive = Field(
        default=_DEFAULT.connections, description="Simultaneous connections; any more get a 503, except probes."
    )
    http_address_connections: Positive | None = Field(
        default=None,
        description="Simultaneous connections of one client address; raise it behind a gateway. Default: three "
        "quarters of all.",
    )
    http_cert_file: Path | None = Field(default=None, description="Certificate of the HTTP server; default: no TLS.")
    http_key_file: Path | None = Field(default=None, description="Key of that certificate.")
    http_client_ca_file: Path | None = Field(
        default=None,
        description="File with the CA certificates to verify clients, which may but need not show a certificate. "
        "Default: clients are not asked for one.",
    )
    http_token_file: Path | None = Field(
        default=None,
        description="File with the bearer tokens that requests need, one per line; probes need none. Default: "
        "requests need no token.",
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. Certificate and key must be given together, and a token file must be readable."""
        settings = super().load(**flags)
        if (settings.http_cert_file is None) != (settings.http_key_file is None):
            raise SettingsError("--http-cert-file and --http-key-file belong together; set both")
        if settings.http_client_ca_file is not None and settings.http_cert_file is None:
            raise SettingsError("--http-client-ca-file needs TLS; add --http-cert-file and --http-key-file")
        _ = settings.http  # raises
        return settings

    @property
    def http(self) -> HttpAccess:
        """Access to the server, and its limits. Raises SettingsError if a token file can't be used."""
        return HttpAccess(
            body_bytes=self.http_body_bytes,
            body_s=self.http_body_s,
            idle_s=self.http_keep_alive_s,
            connections=self.http_connections,
            address_connections=self.http_address_connections,
            cert_file=self.http_cert_file,
            key_file=self.http_key_file,
            client_ca_file=self.http_client_ca_file,
            tokens=read_tokens(self.http_token_file, "--http-token-file") if self.http_token_file is not None else (),
        )


def read_tokens(file: Path, flag: str) -> tuple[bytes, ...]:
    """Bearer tokens, one per line. Raises SettingsError."""
    tokens = read_secret(file, flag).split("\n")
    for number, token in enumerate(tokens, 1):
        if not re.fullmatch(r"[!-~]+", token.strip()):
            raise SettingsError(
                f"{flag} is {str(file)!r}, whose line {number} is not a token; expected printable ASCII without spaces"
            )
    return tuple(token.strip().encode() for token in tokens)
