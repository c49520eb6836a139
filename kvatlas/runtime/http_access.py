"""Who may use an HTTP server, and how much of it. `http_border` enforces it."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvatlas.errors import SettingsError
from kvatlas.runtime.certificate_files import RenewedContext


@dataclass(frozen=True, slots=True)
class HttpAccess:
    """Limits of one server, its certificate, and the tokens of which a request must have one (none: no request needs any).

    `header_s`: seconds that a client has to send a request's headers.
    """

    body_bytes: int = 64 << 20
    header_s: float = 10.0
    connections: int = 4_096
    cert_file: Path | None = None
    key_file: Path | None = None
    tokens: Sequence[bytes] = ()

    def tls_context(self) -> ssl.SSLContext | None:
        """None without a certificate; renewed files are taken up. Raises
        SettingsError for files that are no certificate and its key."""
        if self.cert_file is None:
            return None
        files = [file for file in (self.cert_file, self.key_file) if file is not None]
        return RenewedContext("HTTP server", self._build, files)

    def _build(self) -> ssl.SSLContext:
        assert self.cert_file is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            files = f"--http-cert-file {str(self.cert_file)!r} and --http-key-file {str(self.key_file)!r}"
            raise SettingsError(f"{files} are no certificate and its key: {error.strerror or error}") from None
        return context
