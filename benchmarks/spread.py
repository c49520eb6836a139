"""How many routers decide like one: `python -m benchmarks.spread`.

A burst of 2,000 requests over 16 idle workers, chosen for by one, two and eight router processes: how evenly the prompt
tokens to be computed are spread, and what engines make of it; then without prefixes in flight, and without reservations.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.result import Result
from benchmarks.spread_router import VARIANTS
from benchmarks.spread_workload import Burst, Spread, burst, simulate, tell_fleet
from kvatlas.embedded import valkey_server
from kvatlas.store import Store, open_store

REQUESTS = 2_000
WORKERS = 16
ROUTERS = (1, 2, 8)
READY_S = 60


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


async def measure(
    store: Store, url: str, variants: Sequence[str] = tuple(VARIANTS)
) -> list[tuple[str, int, Spread, float]]:
    """(variant, routers, spread, choices a second)."""
    asked = burst(requests=REQUESTS, workers=WORKERS)
    rows = []
    for variant in variants:
        for routers in ROUTERS:
            found, rate = await spread_of(store, url, asked, routers, variant)
            rows.append((variant, routers, found, rate))
    return rows


def results(rows: list[tuple[str, int, Spread, float]]) -> list[Result]:
    """The figures with a budget: the spread of several routers within 10 % of that of one."""
    one = next(found for variant, routers, found, _ in rows if (variant, routers) == ("all", 1))
    return [
        Result(f"queued tokens at the fullest of {WORKERS} workers, {routers} routers", found.fullest, "x mean", limit)
        for variant, routers, found, _ in rows
        if variant == "all"
        for limit in [None if routers == 1 else one.fullest * 1.1]
    ]


def show(rows: list[tuple[str, int, Spread, float]]) -> Table:
    """Every figure."""
    table = Table(
        *(
            "booked",
            "routers",
            "fullest worker",
            "emptiest",
            "hit rate",
            "workers a new prefix",
            "mean TTFT",
            "p90 TTFT",
        ),
        "choices/s",
        title=f"{REQUESTS:,} requests at once over {WORKERS} workers; queued tokens in times of the mean",
    )
    for variant, routers, found, rate in rows:
        mean = sum(found.queued_tokens) / len(found.queued_tokens)
        table.add_row(
            variant,
            str(routers),
            f"{found.fullest:.3f}",
            f"{min(found.queued_tokens) / mean:.3f}",
            f"{found.hit_rate:.1%}",
            f"{found.copies:.1f}",
            f"{found.mean_ttft_ms:,.0f} ms",
            f"{found.p90_ttft_ms:,.0f} ms",
            f"{rate:,.0f}",
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
