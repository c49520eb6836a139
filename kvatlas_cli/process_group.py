"""Several processes of one command that share its ports."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvatlas.embedded.child_process import child_command
from kvatlas.errors import KvatlasError, SettingsError
from kvatlas.runtime.backoff import Backoff
from kvatlas.settings import RoutingSettings

PROMETHEUS_PORT = "OTEL_EXPORTER_PROMETHEUS_PORT"
LONG_LIFE_S = 60.0
"""A process that ends after running for at least this long is restarted immediately."""

_log = logging.getLogger("kvatlas_cli")


def replica_flags(settings: RoutingSettings, number: int) -> list[str]:
    """The flags of one process: each has its own replica file, whose name ends with the number of the process."""
    return [] if settings.replica_file is None else ["--replica-file", f"{settings.replica_file}.{number}"]


async def run_process_group(
    processes: int, host: str, shared: Mapping[str, int], flags: Callable[[int], Sequence[str]] = lambda _: ()
) -> None:
    """Run this command line in each of `processes` processes until cancelled, then stop them in order.

    `shared`: port flags and the ports on which all processes listen; 0 picks a free one. `flags`: returns additional flags
    for each process, given its number, which starts from 0. A process that crashes is restarted. None outlives this one,
    even if it is killed (Linux). Raises SettingsError for an unavailable port, or KvatlasError if a process ends with an
    error, which that process has already printed.
    """
    with contextlib.ExitStack() as stack:
        words = [*sys.argv[1:], "--processes", "1", "--share-port"]
        for flag, port in shared.items():
            words += [flag, str(stack.enter_context(_reserved(host, port)))]
        async with asyncio.TaskGroup() as tasks:
            for number in range(processes):
                tasks.create_task(_keep_running([*words, *flags(number)], _environment(number)))


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Reserve a port for processes that share it, so that no other process can take it. The socket is bound but does not
    listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            reservation.bind((host, port))
        except OSError as error:
            raise SettingsError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
        yield reservation.getsockname()[1]


def _environment(number: int) -> Mapping[str, str]:
    """The environment of one process: its Prometheus page is on the next port."""
    first = os.environ.get(PROMETHEUS_PORT, "9464")
    port = str(int(first) + number) if first.isdecimal() else first  # the process itself reports an invalid port
    return {**os.environ, PROMETHEUS_PORT: port}


async def _keep_running(words: Sequence[str], environment: Mapping[str, str]) -> None:
    backoff = Backoff(0.5, 10.0)
    while True:
        began = time.monotonic()
        code = await _run(words, environment)
        if code > 0:
            raise KvatlasError(f"a process ended with exit code {code}; stopping the others")
        if time.monotonic() - began > LONG_LIFE_S:
            backoff.reset()
        pause_s = backoff.next_s()
        how = f"was ended by signal {-code}" if code else "ended"
        _log.warning("a process %s; starting another in %g s", how, pause_s)
        await asyncio.sleep(pause_s)


async def _run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run one process until it ends, and return its exit code. If cancelled, ask it to stop and wait."""
    command = child_command([sys.executable, "-m", "kvatlas_cli.main", *words])
    process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    try:
        return await process.wait()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()
        raise
