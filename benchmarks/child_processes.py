"""Starts child processes of a benchmark, and stops them when it ends."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

READY_S = 60
STOP_S = 10


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A running server. `announced`: the part of its output that matched the group of `ready`."""

    pid: int
    announced: str


@asynccontextmanager
async def server_process(
    module: str, args: Sequence[str], ready: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[ServerProcess]:
    """Run `python -m module args`; the block starts when a line of its output matches the pattern `ready`, which has one
    group. `environment`: variables added to this process' own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        *args,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.getcwd(), **(environment or {})},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            found: re.Match[str] | None = None
            last = ""
            while found is None:
                line = (await process.stdout.readline()).decode()
                if not line:
                    raise RuntimeError(f"{module} {args[0]} exited before it was ready: {last.strip()}")
                found, last = re.search(ready, line), line
        drain = asyncio.create_task(process.stdout.read())
        yield ServerProcess(process.pid, found[1])
        drain.cancel()
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Stop a process; kill it if it has not stopped after STOP_S."""
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def indexer_process(nats_url: str, redis_url: str) -> AbstractAsyncContextManager[ServerProcess]:
    """A `kvatlas indexer`."""
    args = ["indexer", "--nats-url", nats_url, "--redis-url", redis_url]
    return server_process("kvatlas_cli.main", args, "(is ready)")


class Child:
    """A benchmark module as a child process. It prints `ready`. Each time it reads a line from stdin, it runs, and
    prints its results, one per line, and then `done`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def start(self, turn: str = "") -> None:
        """Start a turn. `turn`: one line that describes it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{turn}\n".encode())
        await self._process.stdin.drain()

    async def results(self, within_s: float = 2 * READY_S) -> list[str]:
        """Wait until it is done. Returns the lines that it printed."""
        assert self._process.stdout is not None
        lines: list[str] = []
        async with asyncio.timeout(within_s):
            while (line := await self._process.stdout.readline()) != b"done\n":
                if not line:
                    raise RuntimeError("a benchmark's child process exited before it was done")
                lines.append(line.decode().strip())
        return lines


@asynccontextmanager
async def child_process(
    module: str,
    args: Sequence[str],
    *,
    ready_s: float = READY_S,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Child]:
    """`python -m module args`, ready to start; killed at the end. `environment` is added to this process' own."""
    process = await asyncio.create_subprocess_exec(
        python,
        "-m",
        module,
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(ready_s):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{module} exited before it was ready")
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def take_turns(turn: Callable[[str], Awaitable[Sequence[str]]]) -> None:
    """Run the main loop of a child that takes several turns: `turn` gets a line and returns the results. Returns at the
    end of stdin."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(*await turn(line.strip()), "done", sep="\n", flush=True)
