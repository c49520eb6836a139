"""`kvatlas` commands as child processes that end with the test."""

import asyncio
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from kvatlas.embedded.child_process import child_command

ROOT = Path(__file__).parents[2]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, without the variables of kvatlas and telemetry, and with `variables`. Routers and pickers
    end at once when stopped, since no load balancer has to notice. Their decisions wait for the store, however busy the
    machine is."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVATLAS_", "OTEL_"))}
    patient = {"KVATLAS_DECISION_DEADLINE_MS": "60000", "KVATLAS_PICK_DEADLINE_MS": "60000"}
    return {**clean, "PYTHONPATH": str(ROOT), "KVATLAS_DRAIN_S": "0", **patient, **variables}


async def check_out(revision: str, folder: Path) -> Path:
    """Check out a version of this repository into a new folder. Raises AssertionError for an unknown version."""
    folder.mkdir()
    git = ("git", "-C", str(ROOT), "archive", "--output", str(folder / "archive.tar"), revision)
    process = await asyncio.create_subprocess_exec(*git)
    assert await process.wait() == 0, f"no revision {revision}"
    with tarfile.open(folder / "archive.tar") as archive:
        archive.extractall(folder, filter="data")
    return folder


def kvatlas_command(*words: str) -> list[str]:
    """The command line of `kvatlas WORDS`, as a process that ends with this one, even if this one is killed."""
    return child_command([sys.executable, "-m", "kvatlas_cli.main", *words])


@asynccontextmanager
async def service(
    *args: str, ready: str, cwd: Path, variables: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command that runs until it is stopped; yielded once a line of its stderr contains `ready`. `variables`: additional
    environment variables."""
    process = await asyncio.create_subprocess_exec(
        *kvatlas_command(*args),
        stderr=asyncio.subprocess.PIPE,
        env=environment(**(variables or {})),
        cwd=cwd,
    )
    assert process.stderr is not None
    log: list[str] = []
    try:
        with anyio.fail_after(60):
            while not log or ready not in log[-1]:
                line = (await process.stderr.readline()).decode()
                assert line, f"kvatlas {args[0]} exited before it was ready: {''.join(log)}"
                log.append(line)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.stderr.read)
            yield process
            tasks.cancel_scope.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        with anyio.CancelScope(shield=True):
            await process.wait()


async def line_with(text: str, stream: asyncio.StreamReader | None, deadline_s: float = 60.0) -> str:
    """The next line that contains this text; other lines may come before it."""
    assert stream is not None
    with anyio.fail_after(deadline_s):
        while line := (await stream.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"ended without a line {text!r}")


async def query(*args: str) -> str:
    """The stdout of a command that exits by itself, with code 0."""
    process = await asyncio.create_subprocess_exec(
        *kvatlas_command(*args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
    )
    out, err = await process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}: {err.decode()}{out.decode()}"
    return out.decode()
