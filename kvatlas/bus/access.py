"""Access to NATS: addresses, credentials, certificates, and the prefix of the user's inboxes."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvatlas.errors import AccessDenied
from kvatlas.redaction import redact_url
from kvatlas.store.access import tls_context

DEFAULT_INBOX = "_INBOX"


@dataclass(frozen=True, slots=True)
class NatsAccess:
    """`url`: one server, or several of one cluster, separated by commas; the credentials of the first one (user and password,
    or token) are used for all. `creds_file`: a JWT and its seed (`nsc`); `nkey_file`: the seed of an NKey. `ca_file` is
    trusted instead of the system's CA certificates; `cert_file` and `key_file` are this client's. `inbox`: prefix of this
    user's inboxes, as its permissions have it; by default `_INBOX.<user of the URL>`, or `_INBOX` without a user.
    """

    url: str
    creds_file: Path | None = None
    nkey_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    inbox: str | None = None

    @property
    def name(self) -> str:
        """The servers, safe to show: without credentials."""
        return f"NATS at {redact_url(self.url)}"

    def options(self) -> dict[str, Any]:
        """Arguments for nats-py's `connect`. Raises ValueError for a malformed URL, OSError for a file that can't be read,
        ssl.SSLError for a file without a certificate, or AccessDenied for a file without credentials."""
        urls = [urlsplit(one.strip()) for one in self.url.split(",")]
        login, _, _ = urls[0].netloc.rpartition("@")
        user, colon, password = (unquote(part) for part in login.partition(":"))
        options: dict[str, Any] = {
            "servers": [one._replace(netloc=one.netloc.rpartition("@")[2]).geturl() for one in urls],
            "inbox_prefix": self.inbox or (f"{DEFAULT_INBOX}.{user}" if colon and user else DEFAULT_INBOX),
        }
        if colon:
            options |= {"user": user, "password": password}
        elif user:
            options["token"] = user
        if self.creds_file is not None:
            text = self.creds_file.read_text()
            if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
                raise AccessDenied(f"{self.creds_file}: expected a file of credentials, a JWT and its seed")
            options["user_credentials"] = str(self.creds_file)
        if self.nkey_file is not None:
            _check_seed(self.nkey_file)
            options["nkeys_seed"] = str(self.nkey_file)
        if self._has_tls(urls[0].scheme):
            options["tls"] = self._context()
        return options

    def _has_tls(self, scheme: str) -> bool:
        return scheme in ("tls", "wss") or self.ca_file is not None or self.cert_file is not None

    def _context(self) -> ssl.SSLContext:
        return tls_context("NATS", self.ca_file, self.cert_file, self.key_file)


def _check_seed(file: Path) -> None:
    """Check that the file holds a seed. Raises OSError, or AccessDenied for any other content."""
    import nkeys  # installed by the extras that include nats-py

    try:
        nkeys.from_seed(bytearray(file.read_bytes().strip())).wipe()
    except (nkeys.NkeysError, ValueError) as error:
        raise AccessDenied(f"{file}: expected the seed of an NKey") from error
