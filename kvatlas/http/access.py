"""Access to an HTTP server, and its limits. `guard` and `bounded_protocol` enforce them."""

import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.addresses import parse_ip
from kvatlas.errors import SettingsError
from kvatlas.runtime.certificate_files import RenewedContext

MOST_HEADER_BYTES = 64 << 10
PROBES = frozenset({"/health", "/healthz", "/ready", "/readyz"})
"""Paths that are served to everyone, even on the connections reserved for probes. They show whether the server is ready, and
how many workers a router has."""
_KEY_HEADERS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Headers in which clients send a key; the last two are those of Anthropic and Azure."""
_OWN_SITES = (b"same-origin", b"none")


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Limits of one server, its certificate and its tokens. If there are tokens, every request needs one of them; otherwise
    none does.

    `header_s` and `body_s`: how many seconds a client has to send a request's headers, and then its body. `unread_s`: how many
    seconds an answer may wait for a client that reads nothing. `idle_s`: how many seconds an idle connection stays open. This
    must be longer than clients and load balancers keep theirs open (httpx 5 s, aiohttp 15, Go and Envoy's gateways 90, OkHttp
    300, Google's load balancers 600); otherwise a request may be sent on a connection that is just being closed.
    `address_connections`: the maximum number of connections from one client address; None: three quarters of the total.
    `client_ca_file`: the authorities for client certificates, which are optional.
    """

    body_bytes: int = 64 << 20
    header_s: float = 10.0
    body_s: float = 300.0
    unread_s: float = 300.0
    idle_s: int = 620
    connections: int = 16_384
    address_connections: int | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    tokens: Sequence[bytes] = ()
    client_ca_file: Path | None = None
    origins: Sequence[str] = ()
    gated: bool = False

    @property
    def address_share(self) -> int:
        """The number of connections that one address may have."""
        return max(1, self.connections * 3 // 4) if self.address_connections is None else self.address_connections

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context, which picks up renewed files; None if there is no certificate. Raises SettingsError if the files are
        not a certificate and its key."""
        if self.cert_file is None:
            return None
        files = [file for file in (self.cert_file, self.key_file, self.client_ca_file) if file is not None]
        return RenewedContext("HTTP server", self._build, files)

    def why_foreign(self, method: str, headers: Mapping[bytes, bytes], *, near: bool) -> str:
        """Why a request may come from a web page that must not use the server, as one line; empty if it can't come from one.
        `near`: the server is on loopback.

        Without tokens, anyone who can reach a server is trusted, but a page in a browser on that machine can reach it too.
        Without permission, a page can send a POST that is not JSON, and it can read answers if its own name resolves to
        loopback (DNS rebinding)."""
        origin = headers.get(b"origin")
        if self.tokens or self.gated or "*" in self.origins or (origin or b"").decode("latin-1") in self.origins:
            return ""
        host = headers.get(b"host", b"")
        if near and not _is_our_own(host.decode("latin-1")):
            named = host[:80].decode("latin-1")
            return f"Host is {named!r}, but this server is on loopback: ask for localhost, also in a proxy before it"
        if method == "POST" and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
            site = headers.get(b"sec-fetch-site")
            is_own = site in _OWN_SITES if site is not None else origin is None or origin.partition(b"://")[2] == host
            if not is_own:
                return "the request comes from a page of another site; send JSON (Content-Type: application/json)"
        return ""

    def _build(self) -> ssl.SSLContext:
        assert self.cert_file is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one too
            files = f"--http-cert-file {str(self.cert_file)!r} and --http-key-file {str(self.key_file)!r}"
            raise SettingsError(f"{files} are not a certificate and its key: {error.strerror or error}") from None
        if self.client_ca_file is not None:
            context.verify_mode = ssl.CERT_OPTIONAL  # probes and clients with a key present none
            try:
                context.load_verify_locations(self.client_ca_file)
            except OSError as error:
                file = f"--http-client-ca-file {str(self.client_ca_file)!r}"
                raise SettingsError(f"{file} has no certificates: {error.strerror or error}") from None
        return context


def _is_our_own(host: str) -> bool:
    """True for an address, or for a name that public DNS can't resolve."""
    name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    return parse_ip(name) is not None or "." not in name or name.endswith(".localhost")


def keys_in(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys and bearer tokens in a request's headers. The headers' names must be in lower case."""
    keys: list[bytes] = []
    for name, value in headers:
        if name not in _KEY_HEADERS:
            continue
        scheme, _, token = value.partition(b" ") if name == b"authorization" else (b"bearer", b"", value)
        if scheme.lower() == b"bearer":
            keys.append(token.strip())
    return keys
