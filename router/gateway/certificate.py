"""TLS for the picker's port: a certificate from files, read again when they change, or a self-signed one.

Gateways don't check a picker's certificate (their pools name no authority). TLS only keeps prompts from crossing the network in
clear text.
"""

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kvatlas.errors import SettingsError

VALID_DAYS = 3_650
_NAME = "kvatlas-epp"

_log = logging.getLogger("kvatlas_router.gateway")


def self_signed() -> grpc.ServerCredentials:
    """This process's own key and certificate, never written anywhere."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME), x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return grpc.ssl_server_credentials([(pem, certificate.public_bytes(serialization.Encoding.PEM))])


def from_files(certificate: Path, key: Path) -> grpc.ServerCredentials:
    """Credentials that are read again on a new connection if a file has changed. If the new files are invalid, the old
    credentials stay in use.

    Raises SettingsError if the files can't be read or don't belong together.
    """
    used = _read(certificate, key)
    seen = _stamp(certificate, key)

    def current() -> grpc.ServerCertificateConfiguration:
        nonlocal seen, used
        try:
            stamp = _stamp(certificate, key)
            if stamp != seen:
                used, seen = _read(certificate, key), stamp
        except (SettingsError, OSError) as error:
            _log.warning("the new certificate was not used (%s); keeping the old one", error)
        return used

    return grpc.dynamic_ssl_server_credentials(used, current)


def _stamp(*files: Path) -> tuple[int, ...]:
    return tuple(file.stat().st_mtime_ns for file in files)


def _read(certificate: Path, key: Path) -> grpc.ServerCertificateConfiguration:
    texts: list[bytes] = []
    for flag, file in (("--tls-certificate", certificate), ("--tls-key", key)):
        try:
            texts.append(file.read_bytes())
        except OSError as error:
            raise SettingsError(f"{flag} is {str(file)!r}; {error.strerror}") from error
    try:
        public = x509.load_pem_x509_certificates(texts[0])[0].public_key()
        private = serialization.load_pem_private_key(texts[1], None)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"--tls-certificate {str(certificate)!r} and --tls-key {str(key)!r}; expected PEM, a key without a password"
        ) from error
    if public != private.public_key():
        raise SettingsError(f"--tls-key {str(key)!r} is not the key of --tls-certificate {str(certificate)!r}")
    return grpc.ssl_server_certificate_configuration([(texts[1], texts[0])])
