"""Runs a command's coroutine: uvloop where it is installed, clean stops on SIGINT and SIGTERM, telemetry around it."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import closing
from typing import Any

from kvatlas.settings import ProcessSettings
from kvatlas.telemetry import setup_telemetry
from kvatlas_cli.logs import log_to_stderr

STOPPING = (signal.SIGINT, signal.SIGTERM)


def run_service(component: str, settings: ProcessSettings, body: Coroutine[Any, Any, None]) -> None:
    """Run what goes on until it is stopped. SIGINT and SIGTERM cancel it; when it has cleaned up, that is success."""
    _run(component, settings, body)


def run_query(component: str, settings: ProcessSettings, body: Coroutine[Any, Any, None]) -> None:
    """Run what ends by itself. SIGINT and SIGTERM raise KeyboardInterrupt after its clean-up."""
    if not _run(component, settings, body):
        raise KeyboardInterrupt


def tell(line: str) -> None:
    """One line for the user on stderr, such as why a command still waits."""
    print(f"kvatlas: {line}", file=sys.stderr, flush=True)


def _run(component: str, settings: ProcessSettings, body: Coroutine[Any, Any, None]) -> bool:
    """True when the body came to its end, False when a signal stopped it."""
    log_to_stderr(settings.log_level)
    with closing(body):  # it never begins where telemetry can't be set up
        telemetry = setup_telemetry(component)
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_until_stopped(body))
        finally:
            telemetry.shutdown()


async def _until_stopped(body: Coroutine[Any, Any, None]) -> bool:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(body)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    for number in STOPPING:
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        for number in STOPPING:  # a closed loop would go on catching them, for a caller in the same process
            loop.remove_signal_handler(number)
    return not stopped


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
