"""The proxies, each as a process on its own core, in front of the same four engines."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child_processes import end
from kvatlas.embedded.free_port import free_port
from kvatlas_router.upstream.engine_client import EngineAway, EngineClient

PEERS = Path(".bench-proxies/bin")
READY_S = 120.0

Process = asyncio.subprocess.Process
Command = Callable[[int, Sequence[str], str], list[str]]
"""Makes a command line from a free port, the engines' URLs and the store's URL."""


def _kvatlas(*more: str) -> Command:
    def command(port: int, _: Sequence[str], store_url: str) -> list[str]:
        words = ["router", "--port", str(port), "--redis-url", store_url, "--drain-s", "0", "--grace-s", "1", *more]
        return [sys.executable, "-m", "kvatlas_cli.main", *words]

    return command


def _sglang(port: int, engines: Sequence[str], _: str) -> list[str]:
    words = ["launch", "--worker-urls", *engines, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(free_port()), "--log-level", "warn", "--max-concurrent-requests", "-1"]
    return [str(PEERS / "sglang-router"), *words]


def _vllm(port: int, engines: Sequence[str], _: str) -> list[str]:
    words = ["--worker-urls", *engines, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    return [str(PEERS / "vllm-router"), *words, "--prometheus-port", str(free_port()), "--log-level", "warning"]


TARGETS: dict[str, Command] = {
    "kvatlas": _kvatlas(),
    "kvatlas, no tokens": _kvatlas("--tokenizer", "none"),
    "sglang-router": _sglang,
    "vllm-router": _vllm,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A running proxy."""

    name: str
    pid: int
    url: str

    def cpu_us(self) -> float:
        """The CPU time of its threads so far."""
        total = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(OSError):  # it may end in the meantime
                total += int((thread / "schedstat").read_text().split()[0])
        return total / 1_000

    def memory_kib(self) -> int:
        """Its share of resident memory."""
        lines = Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


@asynccontextmanager
async def running(command: Sequence[str], core: int | None, log: Path) -> AsyncIterator[Process]:
    """Run a process on this core. `log`: the file for its output."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
        )
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, {core})
        yield process
    finally:
        await end(process)


async def wait_until_ready(client: EngineClient, url: str, process: Process, log: Path) -> None:
    """Wait until a server answers on one of the usual paths. Raises RuntimeError if its process ends before."""
    async with asyncio.timeout(READY_S):
        while process.returncode is None:
            for path in ("/ready", "/readiness", "/health"):
                with suppress(EngineAway):
                    if (await client.call("GET", url + path)).status == 200:
                        return
            await asyncio.sleep(0.2)
    raise RuntimeError(f"it exited before it was ready; its output is in {log}")
