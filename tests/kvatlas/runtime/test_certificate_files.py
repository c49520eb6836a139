"""Certificates are renewed while connections are made."""

import asyncio
import ssl
import time
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette

from kvatlas.bus.access import NatsAccess
from kvatlas.http.access import HttpAccess
from kvatlas.http.server import listen, serve
from kvatlas.runtime.certificate_files import RenewedContext, certificates_in_use, valid_until
from kvatlas.store.access import RedisAccess
from tests.certificates import Authority, IssuedFiles

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvatlas.runtime.certificate_files.LOOK_S", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def days_in_use(what: str, file: Path) -> tuple[int | None, int | None, bool]:
    """Days left of the certificate in use and of the one on disk, and whether the latter can't be used."""
    (state,) = [one for one in certificates_in_use() if (one["what"], one["file"]) == (what, str(file))]
    in_use, on_disk = (None if one is None else round(one) for one in (state["in_use_days"], state["on_disk_days"]))
    return in_use, on_disk, bool(state["error"])


async def end_of_peer(port: int, trusted: ssl.SSLContext) -> str:
    """The expiry date of the certificate that a server shows."""
    _, writer = await asyncio.open_connection("localhost", port, ssl=trusted)
    shown: dict[str, str] = writer.get_extra_info("ssl_object").getpeercert()
    writer.close()
    return shown["notAfter"]


async def test_an_http_server_shows_a_renewed_certificate_and_keeps_one_that_works(authority: Authority) -> None:
    files = authority.issue("localhost", days=5)
    listener = listen("127.0.0.1", 0, "the server", HttpAccess(cert_file=files.certificate, key_file=files.key))
    port = listener.socket.getsockname()[1]
    trusted = ssl.create_default_context(cafile=authority.file)
    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda task_status: serve(Starlette(), listener, grace_s=0, task_status=task_status))
        async with httpx.AsyncClient(verify=trusted, base_url=f"https://localhost:{port}") as kept:
            await kept.get("/")
            first = await end_of_peer(port, trusted)
            authority.issue("localhost", days=50)
            renewed = await end_of_peer(port, trusted)
            assert renewed != first and days_in_use("HTTP server", files.certificate) == (50, 50, False)
            assert (await kept.get("/")).status_code == 404, "connections that are open stay"
        files.key.write_text("no key")
        assert await end_of_peer(port, trusted) == renewed
        assert days_in_use("HTTP server", files.certificate) == (50, 50, True)
        files.certificate.unlink()
        assert await end_of_peer(port, trusted) == renewed
        assert days_in_use("HTTP server", files.certificate) == (50, None, True)
        authority.issue("localhost", days=70)
        assert await end_of_peer(port, trusted) != renewed
        assert days_in_use("HTTP server", files.certificate) == (70, 70, False)
        tasks.cancel_scope.cancel()


class Guard:
    """A server that asks for certificates, and records the names in them."""

    def __init__(self, authority: Authority, own: IssuedFiles) -> None:
        self._context = own.server_context()
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_verify_locations(authority.file)
        self.shown: list[str] = []

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(self._note, "127.0.0.1", 0, ssl=self._context)

    async def _note(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown = writer.get_extra_info("ssl_object").getpeercert()
        self.shown.append(shown["subject"][0][0][1])
        writer.close()


@pytest.mark.parametrize("server", ["NATS", "Redis"])
async def test_a_client_shows_its_renewed_certificate(authority: Authority, server: str) -> None:
    guard = Guard(authority, authority.issue("localhost"))
    files = authority.issue("before", file="client")
    trusted = authority.file, files.certificate, files.key
    access = (
        NatsAccess("tls://localhost:1", None, None, *trusted).options()["tls"]
        if server == "NATS"
        else RedisAccess("rediss://localhost:1", *trusted).tls_context()
    )
    async with await guard.start() as listening:
        port = listening.sockets[0].getsockname()[1]
        for name in ("before", "after"):
            authority.issue(name, file="client")
            reader, writer = await asyncio.open_connection("localhost", port, ssl=access)
            assert await reader.read() == b""
            writer.close()
    assert guard.shown == ["before", "after"]


async def test_an_authority_that_is_replaced_is_the_one_that_is_trusted(tmp_path: Path, authority: Authority) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    context = RenewedContext("x", lambda: ssl.create_default_context(cafile=authority.file), [authority.file])
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=other.issue("localhost").server_context()
    )
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("localhost", port, ssl=context)
        authority.file.write_bytes(other.file.read_bytes())
        _, writer = await asyncio.open_connection("localhost", port, ssl=context)
        writer.close()


@pytest.mark.parametrize("days", [1, 9, 400, 12_000])
def test_the_end_of_a_certificate_is_read(authority: Authority, days: int) -> None:
    """Dates after 2049 are written in another form."""
    text = authority.issue("localhost", days=days).certificate.read_text()
    assert round((valid_until(f"# a comment\n{text}{authority.file.read_text()}") - time.time()) / 86_400) == days


@pytest.mark.parametrize("cut", [0, 40, 200, 400])
def test_what_is_no_certificate_has_no_end(authority: Authority, cut: int) -> None:
    text = authority.issue("localhost").certificate.read_text()
    with pytest.raises(ValueError, match=r"."):
        valid_until(text[:cut])
