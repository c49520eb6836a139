"""How evenly several routers spread a burst, compared with one.

One, two and eight router processes place 2,000 requests on 16 idle workers, then eight without prefixes in flight, and without
reservations: how evenly the prompt tokens to compute are spread, and the resulting times at the engines.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.table import Table

from benchmarks.child_processes import child_process
from benchmarks.result import Result
from benchmarks.spread.burst import Burst, make_burst, write_fleet
from benchmarks.spread.simulation import Spread, simulate
from kvatlas.store.connection import Store

REQUESTS = 2_000
WORKERS = 16
RUNS = (("all", 1), ("all", 2), ("all", 8), ("no prefixes in flight", 8), ("no reservations", 8))
"""(what is booked, router processes)"""
READY_S = 60
WITHIN = 1.1
"""Budget for the fullest worker with several routers, as a multiple of the figure with one."""


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of one run."""

    variant: str
    routers: int
    spread: Spread
    choices_per_s: float


async def measure(store: Store) -> list[Run]:
    """Measure every run; the first one has a single router."""
    burst = make_burst(requests=REQUESTS, workers=WORKERS)
    return [await _run(store, burst, routers, variant) for variant, routers in RUNS]


async def _run(store: Store, burst: Burst, routers: int, variant: str) -> Run:
    await write_fleet(store, burst, time.time_ns() // 1_000)
    async with AsyncExitStack() as stack:
        children = []
        for number in range(routers):
            args = [store.url, str(routers), str(number), variant, str(len(burst.requests)), str(burst.workers)]
            process = child_process("benchmarks.spread.router_process", args, ready_s=READY_S)
            children.append(await stack.enter_async_context(process))
        await write_fleet(store, burst, time.time_ns() // 1_000)
        for child in children:
            await child.start()
        printed = await asyncio.gather(*(child.results() for child in children))
    choices = sorted(
        (int(when), int(request), worker) for lines in printed for when, request, worker in map(str.split, lines)
    )
    seconds = (choices[-1][0] - choices[0][0]) / 1e9
    spread = simulate(burst, [(request, worker_id) for _, request, worker_id in choices])
    return Run(variant, routers, spread, len(choices) / seconds)


def to_results(runs: Sequence[Run]) -> list[Result]:
    """The figures that have a budget."""
    limit = runs[0].spread.fullest * WITHIN
    return [
        Result(
            f"queued tokens at the fullest of {WORKERS} workers, {run.routers} routers",
            run.spread.fullest,
            "x mean",
            limit,
        )
        for run in runs
        if run.variant == "all" and run.routers > 1
    ]


def tabulate(runs: Sequence[Run]) -> Table:
    """Every figure, and a description of what gets worse without prefixes in flight or reservations."""
    one, two, eight, no_prefixes, no_reservations = (run.spread for run in runs)
    caption = (
        f"Fullest worker compared with one router: {two.fullest / one.fullest - 1:+.1%} with 2 routers, "
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
        title=f"{REQUESTS:,} requests at once over {WORKERS} workers; queued tokens as multiples of the mean",
        caption=caption,
        caption_justify="left",
    )
    for run in runs:
        spread = run.spread
        mean = sum(spread.queued_tokens) / len(spread.queued_tokens)
        table.add_row(
            run.variant,
            str(run.routers),
            f"{spread.fullest:.2f}",
            f"{max(spread.queued_tokens):,}",
            f"{min(spread.queued_tokens) / mean:.2f}",
            f"{spread.hit_rate:.1%}",
            f"{spread.copies:.1f}",
            f"{spread.mean_ttft_ms:,.0f} ms",
            f"{run.choices_per_s:,.0f}",
        )
    return table
