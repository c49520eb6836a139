"""`kvatlas top` in a terminal of its own, and without one."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Iterator

import pytest

from kvatlas.embedded import ServerProcess
from tests.end_to_end.processes import environment, kvatlas_command
from tests.eventually import until_sync
from tests.kvatlas_cli.conftest import Cli


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of 80 columns and 24 lines: ours, and the command's."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


def test_a_terminal_shows_the_fleet_takes_keys_and_is_left_as_it_was(
    terminal: tuple[int, int], nats_server: ServerProcess, fleet_store_url: str
) -> None:
    ours, theirs = terminal
    before = termios.tcgetattr(theirs)
    command = kvatlas_command("top", "--nats-url", nats_server.url, "--redis-url", fleet_store_url)
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    shown = ""

    def shows(text: str) -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 65_536).decode()
        return text in shown

    try:
        until_sync(lambda: shows("2 of 2 workers routable"), deadline_s=60, what="the first screen")
        until_sync(lambda: shows("q quit   s sort (worker)"), what="its keys")
        os.write(ours, b"j\r")
        until_sync(lambda: shows("q back"), what="one worker is open")
        assert "followed by nobody" in shown
        os.write(ours, b"\x1b[B")
        until_sync(lambda: shows("w2 (vllm, both)"), what="the next one is open")
        os.write(ours, b"qq")
        until_sync(lambda: process.poll() is not None, what="it ends")
        until_sync(lambda: shows("\x1b[?1049l"), what="the screen before is back")
        assert process.returncode == 0 and termios.tcgetattr(theirs) == before
        screens = [screen for part in shown.split("\x1b[H")[1:] if (screen := part.partition("\x1b[J")[0])]
        lines = [line.removesuffix("\x1b[K") for screen in screens for line in screen.split("\r\n")]
        assert screens and max(map(len, lines)) <= 80
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_without_a_terminal_it_prints_the_fleet_once(
    cli: Cli, nats_server: ServerProcess, fleet_store_url: str
) -> None:
    done = cli("top", "--nats-url", nats_server.url, "--redis-url", fleet_store_url)
    assert (done.code, done.err) == (0, "")
    assert "2 of 2 workers routable   0 indexers, 0 of 64 partitions owned" in done.out
    assert [line.split()[0] for line in done.out.splitlines()[4:]] == ["w1", "w2"]
    done = cli("top", "--nats-url", "nats://127.0.0.1:1", "--redis-url", fleet_store_url)
    assert done.code == 0 and "going on without heartbeats" in done.err and " w1 " in done.out
