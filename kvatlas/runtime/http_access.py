"""Access to an HTTP server, and its limits. `http_guard` and `bounded_protocol` enforce it."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.errors import SettingsError
from kvatlas.runtime.certificate_files import RenewedContext

MOST_HEADER_BYTES = 64 << 10
PROBES = frozenset({"/health", "/healthz", "/ready", "/readyz"})
"""Paths that are served without a token, and in the reserve: the machine's own probes ask them, and learn one bit."""


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Limits of one server, its certificate, and its tokens; every request needs one of them (none: no request needs a
    token).

    `header_s` and `body_s`: seconds that a client has to send a request's headers, and then its body. `idle_s`: seconds that
    an idle connection stays open. It must be longer than clients and load balancers keep one (httpx 5 s, aiohttp 15, Go and
    Envoy's gateways 90, OkHttp 300, Google's load balancers 600); otherwise a request may be sent on a connection that is just
    being closed. `address_connections`: limit per client address; None: three quarters of all. `client_ca_file`: authorities
    for client certificates, which are optional.
    """

    body_bytes: int = 64 << 20
    header_s: float = 10.0
    body_s: float = 300.0
    idle_s: int = 620
    connections: int = 16_384
    address_connections: int | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    tokens: Sequence[bytes] = ()
    client_ca_file: Path | None = None

    @property
    def address_share(self) -> int:
        """Connections that one address may have."""
        return max(1, self.connections * 3 // 4) if self.address_connections is None else self.address_connections

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context, which picks up renewed files; None if there is no certificate. Raises SettingsError for
        files that are not a certificate and its key."""
        if self.cert_file is None:
            return None
        files = [file for file in (self.cert_file, self.key_file, self.client_ca_file) if file is not None]
        return RenewedContext("HTTP server", self._build, files)

    def _build(self) -> ssl.SSLContext:
        assert self.cert_file is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            files = f"--http-cert-file {str(self.cert_file)!r} and --http-key-file {str(self.key_file)!r}"
            raise SettingsError(f"{files} are not a certificate and its key: {error.strerror or error}") from None
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_OPTIONAL  # probes and holders of keys show none
            try:
                context.load_verify_locations(self.client_ca_file)
            except OSError as error:
                file = f"--http-client-ca-file {str(self.client_ca_file)!r}"
                raise SettingsError(f"{file} has no certificates: {error.strerror or error}") from None
        return context
