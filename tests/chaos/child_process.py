"""One command of kvatlas as a child process, to be killed, paused and started again."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from anyio.to_thread import run_sync

from kvatlas.embedded.child_process import spawn_child
from tests.end_to_end.processes import ROOT, environment
from tests.eventually import until

START_S = 120.0
STOP_S = 15.0


class ChildProcess:
    """`start` and `ready`; then `kill` (SIGKILL), `pause` and `resume` (SIGSTOP, SIGCONT), `stop` (SIGTERM)."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        ready: str,
        folder: Path,
        tree: Path = ROOT,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`ready`: text that its log contains once it is ready. `tree`: the checkout whose version runs, from the next start
        on. `variables`: additional environment variables."""
        self.name = name
        self.arguments = list(arguments)
        self.log = folder / f"{name}.log"
        self.tree = tree
        self.variables = variables
        self._ready = ready
        self.paused = False
        self._log_start = 0
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def pid(self) -> int:
        assert self._popen is not None, f"{self.name} was not started"
        return self._popen.pid

    def start(self) -> None:
        assert not self.is_running, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            command = [sys.executable, "-m", "kvatlas_cli.main", *self.arguments]
            variables = environment(**{"PYTHONPATH": str(self.tree), **self.variables})
            self._popen = spawn_child(command, cwd=self.tree, env=variables, stdout=log, stderr=log)

    async def ready(self) -> None:
        """Wait until its log says that it is ready."""

        def is_ready() -> bool:
            assert self.is_running, f"{self.name} ended by itself: {self.log_text()[-2000:]}"
            return self._ready in self.log_text()

        await until(is_ready, deadline_s=START_S, what=f"{self.name} is ready")

    def log_text(self) -> str:
        """Its log since its last start."""
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.paused = False
        assert self._popen is not None
        self._popen.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        self._signal(signal.SIGCONT)
        self.paused = False

    async def stop(self, within_s: float = STOP_S) -> None:
        """Ask it to end, and wait until it has."""
        self._signal(signal.SIGTERM)
        assert self._popen is not None
        await run_sync(self._popen.wait, within_s)

    def close(self) -> None:
        """Kill it if it runs."""
        if self.is_running:
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._popen is not None and self.is_running, f"{self.name} ended by itself: {self.log_text()[-2000:]}"
        self._popen.send_signal(number)
