"""Access to the store: its address, credentials and certificates."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvatlas.errors import InvalidValue
from kvatlas.redaction import redact_url
from kvatlas.runtime.certificate_files import RenewedContext
from kvatlas.store.sentinel_url import SENTINEL_SCHEMES, SentinelUrl

CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
CLUSTER_PREFIXES = tuple(f"{scheme}://" for scheme in CLUSTER_SCHEMES)


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """`url`: with user and password if the store requires them; for a cluster, any of its servers, separated by commas; for
    Sentinel, in the form that `SentinelUrl` describes. `ca_file` is trusted instead of the system's CA certificates;
    `cert_file` and `key_file` are those of this client, for a store that requires certificates. Files need a scheme that begins
    with `rediss`. `read_replicas`: overlaps are read from a cluster's replicas, which are a few seconds old at most."""

    url: str
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    read_replicas: bool = False

    @property
    def urls(self) -> list[str]:
        """The URL, or the URLs of a cluster's servers."""
        return split_urls(self.url)

    @property
    def name(self) -> str:
        """The store, safe to show: without credentials."""
        return f"Redis at {redact_url(self.url)}"

    @property
    def attributes(self) -> dict[str, str | int]:
        """The store, in the terms of OpenTelemetry's conventions for database clients."""
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return {"server.address": parts.path}
        if parts.scheme in SENTINEL_SCHEMES:
            sentinels = SentinelUrl.parse(self.url)
            host, number = sentinels.sentinels[0]
            return {"server.address": host, "server.port": number, "db.namespace": str(sentinels.database)}
        try:
            port = parts.port
        except ValueError:  # this is reported when connecting
            port = None
        attributes: dict[str, str | int] = {
            "server.address": parts.hostname or "localhost",
            "server.port": port or 6379,
        }
        return (
            attributes if "+cluster" in parts.scheme else {**attributes, "db.namespace": parts.path.strip("/") or "0"}
        )

    def options(self) -> dict[str, Any]:
        """Arguments for redis-py's `from_url`. Raises InvalidValue for certificates without TLS, OSError for a file that can't
        be read, or ssl.SSLError for a file without a certificate."""
        given = {"ssl_ca_certs": self.ca_file, "ssl_certfile": self.cert_file, "ssl_keyfile": self.key_file}
        options = {name: str(file) for name, file in given.items() if file is not None}
        if options:
            if not self.url.startswith("rediss"):
                raise InvalidValue(f"{self.name} has no TLS; expected rediss:// with a file of certificates")
            self.tls_context()
        return options

    def tls_context(self) -> ssl.SSLContext | None:
        """The TLS context of every connection to the store. None if there are no files, because the URL then holds all options.
        Raises the same errors as `options`."""
        if self.ca_file is None and self.cert_file is None:
            return None
        return tls_context("Redis", self.ca_file, self.cert_file, self.key_file)


def split_urls(url: str) -> list[str]:
    """The URLs of a cluster's servers. Any other URL is left whole, because a comma may be part of a password."""
    several = [one.strip() for one in url.split(",")]
    return several if all(one.startswith(CLUSTER_PREFIXES) for one in several) else [url]


def tls_context(
    what: str, ca_file: Path | None = None, cert_file: Path | None = None, key_file: Path | None = None
) -> ssl.SSLContext:
    """A client's context for connections to `what`, which picks up renewed files. Raises OSError for a file that can't be read,
    or ssl.SSLError for a file without a certificate."""

    def build() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
        return context

    files = [file for file in (cert_file, key_file, ca_file) if file is not None]
    return RenewedContext(f"connections to {what}", build, files) if files else build()
