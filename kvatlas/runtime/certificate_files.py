"""Certificate files that are renewed while a process is running: each TLS handshake uses the files that are on disk at the
time.

If new files can't be used, the previous ones stay in use.
"""

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from weakref import WeakSet

from kvatlas.errors import KvatlasError

LOOK_S = 1.0
"""Minimum seconds between two checks of the files."""
DAY_S = 86_400
CERTIFICATE_EXPIRED = 10
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED."""

_log = logging.getLogger("kvatlas.certificates")


@dataclass(frozen=True, slots=True)
class CertificateState:
    """The state of one certificate. `what`: its purpose. The days left are given for the certificate in use and for the one on
    disk; None if unknown. `error`: why the files on disk are not in use."""

    what: str
    file: str
    in_use_days: float | None
    on_disk_days: float | None
    error: str = ""


class RenewedContext(ssl.SSLContext):
    """A context for asyncio, uvloop and others, which use it for each handshake. `build` reads the files, and raises OSError or
    KvatlasError if they are unusable."""

    def __new__(cls, what: str, build: Callable[[], ssl.SSLContext], files: Sequence[Path]) -> "RenewedContext":
        built = build()
        made = super().__new__(cls, built.protocol)
        made._current = built
        return made

    def __init__(self, what: str, build: Callable[[], ssl.SSLContext], files: Sequence[Path]) -> None:
        self._what = what
        self._build = build
        self._files = files
        self._error = ""
        self._looked_at = time.monotonic()
        self._stamp = _stamp(files)
        self._in_use_until = self._on_disk_until()
        self._current: ssl.SSLContext
        self.check_hostname = self._current.check_hostname
        self.verify_mode = self._current.verify_mode
        _in_use.add(self)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        self._look()
        return self._current.wrap_bio(*args, **options)

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        self._look()
        return self._current.wrap_socket(*args, **options)

    @property
    def state(self) -> CertificateState:
        """The current state, after an attempt to use the files on disk."""
        self._look(at_once=True)
        now = time.time()
        in_use, on_disk = (
            None if until is None else (until - now) / DAY_S for until in (self._in_use_until, self._on_disk_until())
        )
        return CertificateState(self._what, str(self._files[0]), in_use, on_disk, self._error)

    def _look(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if now - self._looked_at < LOOK_S and not at_once:
            return
        self._looked_at = now
        stamp = _stamp(self._files)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._current = self._build()
        except (OSError, KvatlasError) as error:  # ssl.SSLError is an OSError
            self._error = str(error)
            _log.warning(
                "%s: %s can't be used (%s); the previous ones stay in use", self._what, self._names, self._error
            )
            return
        self._error = ""
        self._in_use_until = self._on_disk_until()
        _log.info("%s: %s read again", self._what, self._names)

    @property
    def _names(self) -> str:
        return " and ".join(map(str, self._files))

    def _on_disk_until(self) -> float | None:
        return _end_of(self._files[0])


_in_use: WeakSet[RenewedContext] = WeakSet()


def certificates_in_use() -> list[dict[str, Any]]:
    """The state of each certificate that this process uses, as JSON."""
    return [asdict(state) for state in sorted((one.state for one in list(_in_use)), key=lambda one: one.what)]


def describe_verification(error: ssl.SSLCertVerificationError) -> str:
    """Why a server's certificate is not trusted, and how to fix that, in one line."""
    if error.verify_code == CERTIFICATE_EXPIRED:
        return "its certificate has expired: renew it on the server"
    return (
        f"its certificate is not trusted ({error.verify_message}): give its CA, and connect by "
        "the name that it is issued for"
    )


def state_on_disk(what: str, file: Path) -> CertificateState:
    """Read the state of a certificate from its file now."""
    until = _end_of(file)
    days = None if until is None else (until - time.time()) / DAY_S
    return CertificateState(what, str(file), days, days)


def _end_of(file: Path) -> float | None:
    try:
        return valid_until(file.read_text())
    except (OSError, ValueError):
        return None


def valid_until(pem: str) -> float:
    """When the first certificate in a file expires, in seconds since 1970. Raises ValueError if there is no certificate."""
    begin = pem.index(ssl.PEM_HEADER)
    der = ssl.PEM_cert_to_DER_cert(pem[begin : pem.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)])
    try:
        _, at, _ = _field(der, 0)  # Certificate (RFC 5280, 4.1)
        _, at, _ = _field(der, at)  # TBSCertificate
        tag, _, after = _field(der, at)
        if tag == 0xA0:  # the version
            _, _, after = _field(der, after)
        for _ in range(2):  # after the serial number: skip signature and issuer
            _, _, after = _field(der, after)
        _, at, _ = _field(der, after)  # Validity
        _, _, after = _field(der, at)
        tag, at, end = _field(der, after)
    except IndexError as error:
        raise ValueError("a truncated certificate") from error
    form = "%y%m%d%H%M%SZ" if tag == 0x17 else "%Y%m%d%H%M%SZ"
    return datetime.strptime(der[at:end].decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _field(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of a field, and where its content begins and ends (X.690, 8.1)."""
    tag, length, at = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, at = int.from_bytes(der[at : at + size], "big"), at + size
    return tag, at, at + length


def _stamp(files: Sequence[Path]) -> tuple[tuple[int, int], ...]:
    """A value that changes whenever one of the files does; a missing file counts too."""
    found = []
    for file in files:
        try:
            stat = file.stat()
            found.append((stat.st_mtime_ns, stat.st_ino))
        except OSError:
            found.append((0, 0))
    return tuple(found)
