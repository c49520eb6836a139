"""`kvatlas top`: the fleet live in a terminal; one sample as plain text elsewhere."""

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from kvatlas.bus.connection import connect_nats
from kvatlas.errors import Unreachable
from kvatlas.fleet.records import Heartbeat
from kvatlas.settings import TopSettings
from kvatlas_cli.doctor.heartbeats import HeartbeatListener
from kvatlas_cli.flags import with_settings
from kvatlas_cli.logs import printable
from kvatlas_cli.output import PLAIN_WIDTH, print_notice
from kvatlas_cli.runner import run_service
from kvatlas_cli.store_connection import connect_store, open_index
from kvatlas_cli.top.sample import FleetSample, FleetSampler
from kvatlas_cli.top.screen import View, render, sort_workers
from kvatlas_cli.top.terminal import Terminal, open_terminal

FIRST_HEARTBEATS_S = 1.2
"""Each worker sends one per second: after this time we know how far the index lags."""


@with_settings(TopSettings)
def top(settings: TopSettings) -> None:
    """Show workers, lag, hit rates and routers' answers live in a terminal; elsewhere print them once."""
    run_service("top", settings, _top(settings))


async def _top(settings: TopSettings) -> None:
    async with connect_store(settings) as store, _heartbeats(settings) as heard:
        sampler = FleetSampler(store, await open_index(store, settings), heard)
        if sys.stdin.isatty() and sys.stdout.isatty():
            async with open_terminal() as terminal:
                await _show(terminal, sampler, settings.interval_s)
            return
        await asyncio.sleep(FIRST_HEARTBEATS_S)
        for line in render(await sampler.read(), None, View(), PLAIN_WIDTH, None):
            print(printable(line))


@asynccontextmanager
async def _heartbeats(settings: TopSettings) -> AsyncIterator[Mapping[str, Heartbeat]]:
    """Collect the workers' heartbeats inside the block; none without NATS, with a notice."""
    listener = HeartbeatListener()
    try:
        client = await connect_nats(settings.nats, name="kvatlas-top", wait=settings.wait, on_wait=print_notice)
    except Unreachable as error:
        print_notice(f"{error}; continuing without heartbeats")
        yield listener.heard
        return
    try:
        await listener.start(client)
        yield listener.heard
    finally:
        await client.close()


async def _show(terminal: Terminal, sampler: FleetSampler, interval_s: float) -> None:
    """Show the fleet until the user quits."""
    view, before, trouble = View(), None, ""
    sample: FleetSample = await sampler.read()
    loop = asyncio.get_running_loop()
    due_s = loop.time() + interval_s
    while True:
        width, height = terminal.size
        terminal.show(render(sample, before, view, width, height, trouble))
        key = None
        with suppress(TimeoutError):
            async with asyncio.timeout_at(due_s):
                key = await terminal.keys.get()
        if key is not None:
            pressed = view.press(key, sort_workers(sample, view))
            if pressed is None:
                return
            view = pressed
            continue
        try:
            before, sample, trouble = sample, await sampler.read(), ""
        except Unreachable as error:
            trouble = f"{error}; trying again"
        due_s = loop.time() + interval_s
