"""TLS from files: each mistake is reported in one line; settings that exclude each other are refused."""

from pathlib import Path
from typing import Any

import pytest
import trustme

from kvatlas.errors import SettingsError
from kvatlas.settings import GatewaySettings
from kvatlas_router.gateway.certificate import from_files, self_signed


def written(folder: Path, name: str) -> tuple[Path, Path]:
    issued = trustme.CA().issue_cert(f"{name}.example")
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return certificate, key


def test_a_certificate_of_files_or_of_its_own_is_taken(tmp_path: Path) -> None:
    assert from_files(*written(tmp_path, "a")) is not None
    assert self_signed() is not None


def test_mistakes_name_the_file(tmp_path: Path) -> None:
    certificate, key = written(tmp_path, "a")
    _, other = written(tmp_path, "b")
    torn = tmp_path / "torn.crt"
    torn.write_text("-----BEGIN CERTIFICATE-----\n")
    for pair, line in (
        ((certificate, other), f"{other}' is not the key of"),
        ((tmp_path / "nosuch", key), "No such file"),
        ((torn, key), "expected PEM"),
    ):
        with pytest.raises(SettingsError, match=line):
            from_files(*pair)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"tls_certificate": "a.crt"}, "--tls-key .* is missing"),
        ({"tls_key": "a.key"}, "--tls-certificate .* is missing"),
        ({"tls_certificate": "a.crt", "tls_key": "a.key", "plaintext": True}, "both given"),
        ({"response_mode": "some"}, "--response-mode is 'some'"),
        ({"pick_deadline_ms": 0}, "--pick-deadline-ms is 0"),
    ],
)
def test_settings_that_can_not_be_are_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError, match=line):
        GatewaySettings.load(**flags)
