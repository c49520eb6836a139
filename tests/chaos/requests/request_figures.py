"""Counts what is lost while engines fail and routers are replaced: `python -m tests.chaos requests` prints it."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from kvatlas.embedded import valkey_server
from kvatlas.store.connection import open_store
from tests.chaos.requests.request_faults import BREAKS, FAULTS, REQUESTS, run
from tests.chaos.requests.rolled_routers import ROUTERS, RouterProcess, roll

STREAMS = 200


async def print_request_figures(folder: Path, log: Callable[[str], None]) -> bool:
    """Run everything once. True if no request was lost."""
    logging.disable(logging.CRITICAL)  # what engines and routers log about the faults
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(valkey_server())
        store = await open_store(server.url, wait=False)
        stack.push_async_callback(store.close)
        usual = (await run(store, server.url, "none")).median_s
        log(
            f"{REQUESTS} requests over two routers and four engines, one of them bad; usually {usual * 1_000:.0f} ms each"
        )
        log("| the bad engine | lost | broken | longest added latency | attempts there: first third | last third |")
        log("|---|---|---|---|---|---|")
        lost = 0
        for name, continues in [*((name, "off") for name in FAULTS), *((name, "all") for name in sorted(BREAKS))]:
            await store.client.flushall()
            figures = await run(store, server.url, name, continue_answers=continues)
            lost += len(figures.lost)
            added_ms = (figures.longest_s - usual) * 1_000
            shares = f"{figures.share_before:.0%} | {figures.share_after:.0%}"
            named = name if continues == "off" else f"{name}, and others go on"
            log(f"| {named} | {len(figures.lost)} | {figures.broken} | {added_ms:.0f} ms | {shares} |")
        await store.client.flushall()
        rolled = await roll(store, partial(RouterProcess.start, server.url, folder, stack), streams=STREAMS, gap_s=4.0)
        lost += len(rolled.lost)
        log(
            f"{ROUTERS} routers replaced one by one under {STREAMS} streams: {rolled.complete} streams complete, "
            f"{rolled.across} of them ran at a router that was told to stop, {len(rolled.lost)} lost; "
            f"longest added time to a first byte {rolled.added_s * 1_000:.0f} ms"
        )
        for line in rolled.lost[:5]:
            log(f"LOST: {line}")
    return not lost
