"""Runs a command's coroutine: with uvloop if it is installed, telemetry, and a clean stop on SIGINT and SIGTERM."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from typing import Any

from kvatlas.runtime.descriptors import raise_limit
from kvatlas.runtime.process_gauges import process_gauges
from kvatlas.settings import ProcessSettings
from kvatlas.telemetry import export_metrics, setup_telemetry
from kvatlas_cli.logs import log_to_stderr
from kvatlas_cli.memory_release import releasing_memory
from kvatlas_cli.output import print_notice

NEW_OBJECTS = 50_000
"""The collector looks for cycles after this many new objects instead of 700. Services make hardly any cycles but keep millions
of blocks, which the collector would scan again and again in vain."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


_stopped: list[asyncio.Future[None]] = []
"""The command's task, once a signal has stopped it."""


def print_ready(line: str) -> None:
    """Announce the service of this process. If it was stopped before, it is cancelled again: Python 3.11's `wait_for`, with
    which libraries connect, swallows a cancellation that arrives together with its result."""
    print_notice(line)
    for task in _stopped:
        task.cancel()


def run_service(
    component: str, settings: ProcessSettings, body: Coroutine[Any, Any, None], *, metrics_page: bool = False
) -> None:
    """Run a service until it is stopped. SIGINT and SIGTERM cancel it; a clean stop counts as success.

    `metrics_page`: the service serves `kvatlas.telemetry.read_metrics_page`.
    """
    raise_limit()
    with _seldom_collected(), releasing_memory():
        _run(component, settings, body, style=settings.log_format, metrics_page=metrics_page)


def run_query(component: str, settings: ProcessSettings, body: Coroutine[Any, Any, None]) -> None:
    """Run a command that ends on its own. SIGINT and SIGTERM cancel it and raise KeyboardInterrupt."""
    style = "plain" if settings.log_format == "console" else settings.log_format
    if not _run(component, settings, body, style=style):
        raise KeyboardInterrupt


@contextmanager
def _seldom_collected() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # modules and classes stay: don't scan them again
    gc.set_threshold(NEW_OBJECTS, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _run(
    component: str,
    settings: ProcessSettings,
    body: Coroutine[Any, Any, None],
    *,
    style: str,
    metrics_page: bool = False,
) -> bool:
    """Run the body. Returns True if it ended on its own; False if a signal stopped it."""
    log_to_stderr(settings.log_level, style)
    with closing(body):  # the body never starts if telemetry can't be set up
        telemetry = setup_telemetry(component, metrics_page=metrics_page)
        try:
            with export_metrics("process", process_gauges), asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_run_until_stopped(body))
        finally:
            telemetry.shutdown()


async def _run_until_stopped(body: Coroutine[Any, Any, None]) -> bool:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(body)

    def stop() -> None:
        _stopped[:] = [task]
        task.cancel()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not _stopped:
            raise
    finally:
        for number in STOP_SIGNALS:  # otherwise a closed loop would keep catching them in this process
            loop.remove_signal_handler(number)
        by_signal = bool(_stopped)
        _stopped.clear()
    return not by_signal


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop
