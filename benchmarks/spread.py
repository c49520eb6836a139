"""How many routers decide like one: `python -m benchmarks.spread`.

A burst of 2,000 requests over 16 idle workers, chosen for by one, two and eight router processes: how evenly the prompt
tokens to be computed are spread, and what engines make of it; then by eight without prefixes in flight, and without
reservations.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.result import Result
from benchmarks.spread_workload import Burst, Spread, burst, simulate, tell_fleet
from kvatlas.embedded import valkey_server
from kvatlas.store.connection import Store, open_store

REQUESTS = 2_000
WORKERS = 16
RUNS = (("all", 1), ("all", 2), ("all", 8), ("no prefixes in flight", 8), ("no reservations", 8))
"""(what is booked, router processes)"""
READY_S = 60
WITHIN = 1.1
"""Several routers spread a burst this well, in times of what one does."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one run came to."""

    variant: str
    routers: int
    found: Spread
    choices_per_s: float


async def spread_of(store: Store, url: str, asked: Burst, routers: int, variant: str) -> tuple[Spread, float]:
    """What so many router processes make of a burst, and how many choices a second they made."""
    await tell_fleet(store, asked, time.time_ns() // 1_000)
    async with AsyncExitStack() as stack:
        children = []
        for number in range(routers):
            words = [url, str(routers), str(number), variant, str(len(asked.requests)), str(asked.workers)]
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "benchmarks.spread_router",
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            stack.push_async_callback(_ended, child)
            children.append(child)
        async with asyncio.timeout(READY_S):
            for child in children:
                await _line(child, b"ready")
            await tell_fleet(store, asked, time.time_ns() // 1_000)
            for child in children:
                _go(child)
            told = await asyncio.gather(*(_chosen(child) for child in children))
        for child in children:
            _go(child)
    chosen = sorted(one for part in told for one in part)
    seconds = (chosen[-1][0] - chosen[0][0]) / 1e9
    return simulate(asked, [(request, worker_id) for _, request, worker_id in chosen]), len(chosen) / seconds


async def measure(store: Store, url: str) -> list[Row]:
    """Every run; the first one is that of a single router."""
    asked = burst(requests=REQUESTS, workers=WORKERS)
    rows = []
    for variant, routers in RUNS:
        found, rate = await spread_of(store, url, asked, routers, variant)
        rows.append(Row(variant, routers, found, rate))
    return rows


def results(rows: Sequence[Row]) -> list[Result]:
    """The figures with a budget."""
    limit = rows[0].found.fullest * WITHIN
    return [
        Result(
            f"queued tokens at the fullest of {WORKERS} workers, {row.routers} routers",
            row.found.fullest,
            "x mean",
            limit,
        )
        for row in rows
        if row.variant == "all" and row.routers > 1
    ]


def show(rows: Sequence[Row]) -> Table:
    """Every figure, and in words what is worse without."""
    one, eight, no_prefixes, no_reservations = (rows[i].found for i in (0, 2, 3, 4))
    caption = (
        f"Fullest worker beside that of one router: {rows[1].found.fullest / one.fullest - 1:+.1%} with 2 routers, "
        f"{eight.fullest / one.fullest - 1:+.1%} with 8.\n"
        f"Without prefixes in flight each new prefix is computed on {no_prefixes.copies:.0f} workers instead of "
        f"{eight.copies:.0f}: every worker has more to do, so the fullest is {no_prefixes.fullest:.2f} times the mean but "
        f"has {max(no_prefixes.queued_tokens) / max(eight.queued_tokens):.1f} times as many tokens queued.\n"
        f"Without reservations the fullest is {no_reservations.fullest:.2f} times the mean, with "
        f"{max(no_reservations.queued_tokens) / max(eight.queued_tokens):.1f} times as many tokens."
    )
    table = Table(
        *("booked", "routers", "fullest worker", "tokens there", "emptiest", "hit rate", "workers a prefix"),
        *("mean TTFT", "choices/s"),
        title=f"{REQUESTS:,} requests at once over {WORKERS} workers; queued tokens in times of the mean",
        caption=caption,
        caption_justify="left",
    )
    for row in rows:
        found = row.found
        mean = sum(found.queued_tokens) / len(found.queued_tokens)
        table.add_row(
            row.variant,
            str(row.routers),
            f"{found.fullest:.2f}",
            f"{max(found.queued_tokens):,}",
            f"{min(found.queued_tokens) / mean:.2f}",
            f"{found.hit_rate:.1%}",
            f"{found.copies:.1f}",
            f"{found.mean_ttft_ms:,.0f} ms",
            f"{row.choices_per_s:,.0f}",
        )
    return table


async def _line(child: asyncio.subprocess.Process, wanted: bytes) -> None:
    assert child.stdout is not None
    if (line := await child.stdout.readline()).strip() != wanted:
        raise RuntimeError(f"a router process said {line!r}; expected {wanted!r}")


def _go(child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    child.stdin.write(b"\n")


async def _chosen(child: asyncio.subprocess.Process) -> list[tuple[int, int, str]]:
    assert child.stdout is not None
    chosen = []
    while (line := (await child.stdout.readline()).strip()) != b"done":
        if not line:
            raise RuntimeError("a router process ended before it had chosen")
        when, request, worker_id = line.decode().split()
        chosen.append((int(when), int(request), worker_id))
    return chosen


async def _ended(child: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(10):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


async def _main() -> None:
    async with valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            rows = await measure(store, valkey.url)
        finally:
            await store.close()
    Console(width=140).print(show(rows))


if __name__ == "__main__":
    uvloop.run(_main())
