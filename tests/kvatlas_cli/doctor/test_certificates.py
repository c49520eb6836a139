"""The doctor's findings about our processes' certificates."""

from pathlib import Path

import pytest

from kvatlas.bus.access import NatsAccess
from kvatlas.runtime.certificate_files import CertificateState
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import connected_store
from kvatlas_cli.doctor.certificates import judge_certificates, own_certificates
from kvatlas_cli.doctor.finding import Level
from kvatlas_cli.doctor.sidecars import judge_status_pages, read_status_pages
from tests.certificates import Authority
from tests.router.proxy.engines import running_fleet, running_proxy

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("in_use", "on_disk", "error", "level", "says"),
    [
        (60.2, 60.2, "", Level.OK, "f.pem is in use, 60 days left; on disk 60 days left"),
        (3.0, 3.0, "", Level.WARNING, "3 days left"),
        (-2.0, -2.0, "", Level.ERROR, "expired 2 days ago"),
        (60.0, None, "no PEM", Level.ERROR, "which can't be used: no PEM"),
        (None, None, "", Level.OK, "expiry unknown"),
    ],
)
def test_days_left_decide(in_use: float | None, on_disk: float | None, error: str, level: Level, says: str) -> None:
    (found,) = judge_certificates("here", [CertificateState("HTTP server", "f.pem", in_use, on_disk, error)])
    assert found.level is level and says in found.line and "here, HTTP server" in found.line


def test_the_certificates_that_the_command_shows_are_examined(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue("client", days=20)
    nats = NatsAccess("tls://h", None, None, None, files.certificate, files.key)
    redis = RedisAccess("rediss://h", None, tmp_path / "gone.pem", files.key)
    first, second = own_certificates(nats, redis)
    assert first.what == "connections to NATS" and round(first.on_disk_days or 0) == 20
    assert second.what == "connections to Redis" and second.on_disk_days is None


async def test_a_routers_page_tells_what_is_on_disk_and_in_use(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("127.0.0.1", days=9)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    async with (
        connected_store(store_url, wait=False) as store,
        running_fleet(store, {}),
        running_proxy(store_url, http_cert_file=files.certificate, http_key_file=files.key) as client,
    ):
        pages = await read_status_pages([str(client.base_url)])
        of_server = [one for one in judge_status_pages(pages, (), "nats") if str(files.certificate) in one.line]
        assert [one.level for one in of_server] == [Level.WARNING] and "9 days left; on disk 9 days" in of_server[
            0
        ].line
