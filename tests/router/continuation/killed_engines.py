"""Engines in separate processes, each of which is killed (SIGKILL) after some events of its first stream. A server with
everything imported forks them, which takes a tenth of a normal start's time."""

import multiprocessing
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import anyio
from anyio.to_thread import run_sync

from kvatlas_simulator.service import run_engine
from tests.simulator.answer_faults import AnswerFaults
from tests.simulator.running_engine import engine_settings

START_S = 60.0
_CONTEXT = multiprocessing.get_context("forkserver")


def _run(after: int, changed: Mapping[str, Any], ready: Connection) -> None:
    faults = AnswerFaults("kill", after)
    anyio.run(run_engine, engine_settings(**changed), lambda addresses: ready.send(addresses.base_url), faults)


@asynccontextmanager
async def killed_engines(after: Mapping[str, int], **changed: Any) -> AsyncIterator[Mapping[str, str]]:
    """The engines' addresses by worker. `after`: the number of events that each sends. At the end, all must have been
    killed."""
    _CONTEXT.set_forkserver_preload([__name__])
    running: dict[str, tuple[ForkServerProcess, Connection]] = {}
    try:
        for worker_id, events in after.items():
            here, there = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_run, args=(events, changed, there), daemon=True)
            process.start()
            there.close()
            running[worker_id] = process, here
        urls = {}
        for worker_id, (_, ready) in running.items():
            assert await run_sync(ready.poll, START_S), f"{worker_id} did not start"
            urls[worker_id] = ready.recv()
        yield urls
        for worker_id, (process, _) in running.items():
            await run_sync(process.join, START_S)
            assert process.exitcode == -9, (worker_id, process.exitcode)
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()
