"""Child processes of a benchmark; they end with it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

READY_S = 30


@asynccontextmanager
async def indexer_process(nats_url: str, redis_url: str, *flags: str) -> AsyncIterator[None]:
    """A `kvatlas indexer`, ready."""
    words = ["-m", "kvatlas_cli.main", "indexer", "--nats-url", nats_url, "--redis-url", redis_url, *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stderr=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(READY_S):
            last = b""
            while b"is ready" not in (line := await process.stderr.readline()):
                last = line or last
                if not line:
                    raise RuntimeError(f"the indexer ended before it was ready: {last.decode().strip()}")
        drain = asyncio.create_task(process.stderr.read())
        yield
        drain.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(10):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


class Child:
    """A module of the benchmarks in a process of its own. It says `ready`, waits for a line on stdin, does its part, and
    tells one line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def go(self) -> None:
        """Let it do its part."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        await self._process.stdin.drain()

    async def ask(self, within_s: float = 2 * READY_S) -> str:
        """Let it do its part, and wait for the line that it tells."""
        await self.go()
        assert self._process.stdout is not None
        async with asyncio.timeout(within_s):
            if not (line := await self._process.stdout.readline()):
                raise RuntimeError("a benchmark's process ended before it was done")
        return line.decode().strip()


@asynccontextmanager
async def child_process(module: str, words: Sequence[str], *, ready_s: float = READY_S) -> AsyncIterator[Child]:
    """`python -m module words`, which waits to be let go. Killed in the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(ready_s):
            if await process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{module} ended before it was ready")
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def telling_process(
    nats_url: str, hashes_a_message: int, messages: int, rate: int = 0
) -> AbstractAsyncContextManager[Child]:
    """A `benchmarks.made_up_publisher`; it is done when the stream has acknowledged everything."""
    return child_process("benchmarks.made_up_publisher", [nats_url, str(hashes_a_message), str(messages), str(rate)])
