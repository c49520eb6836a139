"""One server process: starting it, watching it and stopping it. Blocking, and independent of any event loop."""

import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Self

from kvatlas.embedded.child_process import spawn_child
from kvatlas.embedded.free_port import LOOPBACK, free_port
from kvatlas.embedded.temporary_directory import OwnedDirectory
from kvatlas.errors import KvatlasError

LOG_FILE = "server.log"
_PROBE_INTERVAL_S = 0.005
_PORT_TRIES = 5
_LAST_LINES = 4


class EmbeddedServerError(KvatlasError):
    """An embedded server can't be started or is not running."""


class PortTakenError(EmbeddedServerError):
    """Another process listens on the server's port."""


def _do_nothing() -> None:
    """The default of `while_waiting`."""


class ServerProcess(ABC):
    """A server program with a loopback port and a directory of its own. As a context manager, it is started on entry and gone
    on exit.

    `port` 0 chooses a free port, which is then kept across restarts. `data_dir` None creates a temporary directory that
    `close()` removes; a directory that is given is kept. Not thread-safe.
    """

    name: str
    """The program's name in messages."""

    def __init__(self, binary: Path, *, port: int, data_dir: Path | None, start_deadline_s: float) -> None:
        if not 0 <= port <= 65535:
            raise EmbeddedServerError(f"{self.name}: port {port} is not from 0 to 65535")
        self._binary = binary
        self._port = port
        self._chosen_here = port == 0
        self._given_dir = data_dir
        self._temporary: OwnedDirectory | None = None
        self._start_deadline_s = start_deadline_s
        self._popen: subprocess.Popen[bytes] | None = None
        self._log_offset = 0
        self._paused = False
        self._has_answered = False

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # To be implemented for each kind of server.

    @property
    @abstractmethod
    def url(self) -> str:
        """The address for clients, including credentials if the server has any."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Write the configuration into `data_dir`, and return the arguments for the program."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """True if this very process is answering requests; False if a different server answers on its port."""

    def _choose_port(self) -> int:
        return free_port()

    # Common to all kinds of servers.

    @property
    def port(self) -> int:
        """The port; 0 before the first start if a free one will be chosen."""
        return self._port

    @property
    def pid(self) -> int:
        """The process id of the running server. Raises EmbeddedServerError when it is not running."""
        if self._popen is None or self._popen.poll() is not None:
            raise EmbeddedServerError(f"{self.name} on port {self._port} is not running")
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """True if the process exists (it may be paused)."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def data_dir(self) -> Path:
        """The server's directory; created if necessary."""
        if self._given_dir is not None:
            self._given_dir.mkdir(parents=True, exist_ok=True)
            return self._given_dir
        if self._temporary is None:
            self._temporary = OwnedDirectory()
        return self._temporary.path

    def last_log_lines(self, count: int = _LAST_LINES) -> list[str]:
        """The last non-empty lines that the server has written since it was last started."""
        log = self.data_dir / LOG_FILE
        if not log.exists():
            return []
        with log.open("rb") as lines:
            lines.seek(self._log_offset)
            text = lines.read().decode(errors="replace")
        return [line.strip() for line in text.splitlines() if line.strip()][-count:]

    def start(self, *, while_waiting: Callable[[], object] = _do_nothing) -> None:
        """Start the server and wait until it answers. Does nothing if it is already running.

        `while_waiting` is called every few milliseconds until then; if it raises, the start is aborted. Raises
        EmbeddedServerError if the program is missing or ends, or if it does not answer in time. Whatever makes the start fail,
        no process is left behind.
        """
        if self.is_running:
            return
        if not os.access(self._binary, os.X_OK) or not self._binary.is_file():
            raise EmbeddedServerError(f"{self.name}: {self._binary} is not an executable file")
        for tries_left in reversed(range(_PORT_TRIES)):
            if self._chosen_here and self._port == 0:
                self._port = self._choose_port()
            try:
                self._start_once(while_waiting)
            except PortTakenError:
                if not self._chosen_here or self._has_answered or tries_left == 0:
                    raise
                self._port = 0
            else:
                self._has_answered = True
                return

    def stop(self, *, deadline_s: float = 10.0) -> None:
        """Terminate the server, and kill it if it has not ended by the deadline. Its data and port are kept for another
        `start()`."""
        popen = self._popen
        if popen is None:
            return
        if self._paused:
            self.resume()
        popen.terminate()
        try:
            popen.wait(deadline_s)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        self._popen = None

    def kill(self) -> None:
        """Kill the server (SIGKILL), as in a crash, and wait until it is gone. Its data and port are kept."""
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()
            self._popen = None
        self._paused = False

    def restart(self, *, while_waiting: Callable[[], object] = _do_nothing) -> None:
        """Stop the server, and start it on the same port with the same data."""
        self.stop()
        self.start(while_waiting=while_waiting)

    def pause(self) -> None:
        """Freeze the server (SIGSTOP): connections stay open, and nothing answers once this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a thread may still run for a moment
        self._paused = True

    def resume(self) -> None:
        """Let a paused server continue (SIGCONT)."""
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        """Stop the server and remove its directory if it is temporary."""
        self.stop()
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None

    def _start_once(self, while_waiting: Callable[[], object]) -> None:
        log = self.data_dir / LOG_FILE
        # don't resolve links: a program may choose its role by the name of the link (Debian's redis-server)
        command = [str(self._binary.absolute()), *self._command()]
        self._paused = False
        with log.open("ab") as output:
            self._log_offset = output.tell()
            self._popen = spawn_child(command, cwd=self.data_dir, stdout=output, stderr=subprocess.STDOUT)
        try:
            self._wait_until_ready(self._popen, while_waiting)
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self, popen: subprocess.Popen[bytes], while_waiting: Callable[[], object]) -> None:
        deadline = time.monotonic() + self._start_deadline_s
        while True:
            exit_code = popen.poll()
            if exit_code is not None:
                lines = self.last_log_lines()
                if any("address already in use" in line.lower() for line in lines):
                    raise PortTakenError(f"{self.name} can't listen on {LOOPBACK}:{self._port}: address already in use")
                output = " | ".join(lines) or "no output"
                raise EmbeddedServerError(
                    f"{self.name} on {LOOPBACK}:{self._port} exited at start with code {exit_code}: {output}"
                )
            if self._is_ready():
                return
            if time.monotonic() > deadline:
                output = " | ".join(self.last_log_lines()) or "no output"
                raise EmbeddedServerError(
                    f"{self.name} on {LOOPBACK}:{self._port} did not answer within {self._start_deadline_s:g} s: {output}"
                )
            while_waiting()
            time.sleep(_PROBE_INTERVAL_S)
