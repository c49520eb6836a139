"""A command of kvatlas in a terminal of its own."""

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Iterator

from tests.end_to_end.processes import environment, kvatlas_command
from tests.eventually import until

TERMINAL = 80, 24
"""Columns and lines."""


class PseudoTerminal:
    """What the command shows, and its keys."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._shown = ""

    def press(self, keys: str) -> None:
        """From now on only what is shown after them counts."""
        self.read()
        self._shown = ""
        os.write(self._fd, keys.encode())

    def read(self) -> str:
        """All that was shown."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._shown += os.read(self._fd, 65_536).decode()
        return self._shown

    async def until_shown(self, text: str) -> str:
        """The last whole screen, when it has the text."""

        def screen() -> str:
            whole = self.read().rpartition("\x1b[J")[0].rpartition("\x1b[H")[2]
            return whole.replace("\x1b[K", "").replace("\r", "") if text in whole else ""

        return await until(screen, deadline_s=60, what=f"{text!r} on the terminal")


@contextlib.contextmanager
def kvatlas_in_terminal(*words: str) -> Iterator[PseudoTerminal]:
    """A command that `q` leaves."""
    ours, theirs = pty.openpty()
    columns, lines = TERMINAL
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    os.set_blocking(ours, False)
    process = subprocess.Popen(kvatlas_command(*words), stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    try:
        yield PseudoTerminal(ours)
        os.write(ours, b"qq")
        process.wait(10)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
