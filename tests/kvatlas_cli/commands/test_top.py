"""`kvatlas top` in its own terminal."""

import contextlib
import os
import pty
import signal
import subprocess

from tests.end_to_end.processes import environment, kvatlas_command
from tests.eventually import until_sync


def test_a_terminal_shows_the_workers_until_interrupted_and_gets_its_screen_back(fleet_store_url: str) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    command = kvatlas_command("top", "--redis-url", fleet_store_url, "--interval-s", "0.2")
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**environment(), "TERM": "xterm"})
    shown = ""

    def shows(text: str, times: int = 1) -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(ours, 65_536).decode()
        return shown.count(text) >= times

    try:
        until_sync(lambda: shows("2 workers", times=3), deadline_s=60, what="the screen is drawn again")
        assert "w1" in shown and "running" in shown
        process.send_signal(signal.SIGINT)
        until_sync(lambda: process.poll() is not None, what="it ends")
        until_sync(lambda: shows("\x1b[?1049l"), what="the screen before is back")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
