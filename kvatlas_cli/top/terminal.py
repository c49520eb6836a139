"""The terminal of `kvatlas top`: reads keys, shows screens (thin)."""

import asyncio
import os
import shutil
import sys
import termios
import tty
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvatlas_cli.logs import printable

_KEYS = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1b[C": "right",
    "\x1b[D": "left",
    "\x1b[H": "home",
    "\x1b[F": "end",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class Terminal:
    """The terminal that `open_terminal` opens. `keys`: the pressed keys."""

    def __init__(self) -> None:
        self.keys: asyncio.Queue[str] = asyncio.Queue()

    @property
    def size(self) -> tuple[int, int]:
        """(columns, lines), up to date after a resize."""
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def show(self, lines: Sequence[str]) -> None:
        """Replace the screen's content; no line may be wider than the screen."""
        text = "\r\n".join(f"{printable(line)}\x1b[K" for line in lines)
        sys.stdout.write(f"\x1b[H{text}\x1b[J")
        sys.stdout.flush()

    def read_keys(self, fd: int) -> None:
        data = os.read(fd, 1024).decode(errors="ignore")
        while data:
            for spelled in sorted(_KEYS, key=len, reverse=True):
                if data.startswith(spelled):
                    self.keys.put_nowait(_KEYS[spelled])
                    data = data[len(spelled) :]
                    break
            else:
                self.keys.put_nowait(data[0])
                data = data[1:]


@asynccontextmanager
async def open_terminal() -> AsyncIterator[Terminal]:
    """Open the terminal of stdin and stdout with a separate screen; its previous state is always restored at the end."""
    terminal, fd = Terminal(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    loop = asyncio.get_running_loop()
    tty.setcbreak(fd)
    loop.add_reader(fd, terminal.read_keys, fd)
    sys.stdout.write(_ENTER)
    try:
        yield terminal
    finally:
        loop.remove_reader(fd)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
