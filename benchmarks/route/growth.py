"""The cost of a choice as its pool grows, one dimension at a time: `python -m benchmarks.route.growth`.

Prompts are given as hashes, so the router does not hash them. Times and CPU times are for one choice with its booking,
its first token and its end; overlaps are requested separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter, process_time

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.peer.ours.pool import SCOPE, held_prefixes, write_loads, write_pool
from benchmarks.peer.prompts import BLOCK_SIZE, PromptSource
from benchmarks.stores import store_cpu_s, valkey_store
from benchmarks.timing import quantile
from kvatlas.blocks.hashing import extend_chain
from kvatlas.store.connection import Store
from router_client import Basis, Prompt, RouterClient, RouterSettings

WORKERS, HOLDERS, BLOCKS = 64, 8, 512
POINTS = {
    "workers": [(workers, HOLDERS, BLOCKS) for workers in (8, 64, 256, 1_000)],
    "blocks": [(WORKERS, HOLDERS, blocks) for blocks in (64, 512, 2_048, 8_192)],
    "holders": [(256, holders, BLOCKS) for holders in (1, 8, 64, 256)],
}
"""(workers, holders of each prefix, each to a different depth, blocks of a prompt)."""
WARM_UP = 30
CALLS = 120
BAR = 24
"""Length of the longest bar, in characters."""


@dataclass(frozen=True, slots=True)
class Point:
    """Medians in milliseconds; CPU times are means."""

    workers: int
    holders: int
    blocks: int
    choice_ms: float
    overlap_ms: float
    router_ms: float
    store_ms: float


async def measure(store: Store) -> list[Table]:
    """A table for each dimension."""
    return [_tabulate(name, [await _measure(store, *point) for point in points]) for name, points in POINTS.items()]


async def _measure(store: Store, workers: int, holders: int, blocks: int) -> Point:
    source = PromptSource(workers, holders, blocks)
    await write_pool(store, workers, held_prefixes(source))
    prompts = [_by_hashes(tokens) for tokens in islice(source, WARM_UP + CALLS)]
    async with RouterClient.open(store.url, RouterSettings(deadline_ms=None), wait=False) as router:
        overlaps = [await _time_overlap(router, prompt) for prompt in prompts]
        await write_loads(store, workers)
        for prompt in prompts[:WARM_UP]:
            await _time_choice(router, prompt)
        store_s, router_s = await store_cpu_s(store), process_time()
        choices = [await _time_choice(router, prompt) for prompt in prompts[WARM_UP:]]
        router_s, store_s = process_time() - router_s, await store_cpu_s(store) - store_s
    return Point(
        workers,
        holders,
        blocks,
        quantile(sorted(choices), 0.5) * 1e3,
        quantile(sorted(overlaps[WARM_UP:]), 0.5) * 1e3,
        router_s * 1e3 / CALLS,
        store_s * 1e3 / CALLS,
    )


def _by_hashes(tokens: list[int]) -> Prompt:
    return Prompt.of_hashes(SCOPE, extend_chain(tokens, BLOCK_SIZE), BLOCK_SIZE, input_tokens=len(tokens))


async def _time_overlap(router: RouterClient, prompt: Prompt) -> float:
    began = perf_counter()
    await router.overlap(prompt)
    return perf_counter() - began


async def _time_choice(router: RouterClient, prompt: Prompt) -> float:
    """Seconds until a choice is reserved. Raises RuntimeError for a choice that was not made by cost."""
    began = perf_counter()
    choice = await router.reserve(prompt)
    seconds = perf_counter() - began
    if choice.basis is not Basis.COST:
        raise RuntimeError(f"a choice was made by {choice.basis}; expected all by cost")
    await choice.first_token()
    await choice.done()
    return seconds


def _tabulate(dimension: str, points: Sequence[Point]) -> Table:
    """One row per point. The bars show the choice's time, relative to the longest of the dimension."""
    first = points[0]
    fixed = {"workers": first.workers, "holders": first.holders, "blocks": first.blocks}
    rest = ", ".join(f"{value} {name}" for name, value in fixed.items() if name != dimension)
    table = Table(
        dimension, "choice, p50 ms", "", "overlap, p50 ms", "router ms", "store ms", title=f"by {dimension}; {rest}"
    )
    longest = max(point.choice_ms for point in points)
    for point in points:
        bar = "#" * max(1, round(BAR * point.choice_ms / longest))
        figures = (point.overlap_ms, point.router_ms, point.store_ms)
        table.add_row(
            f"{getattr(point, dimension):,}", f"{point.choice_ms:.2f}", bar, *(f"{figure:.2f}" for figure in figures)
        )
    return table


async def _main() -> None:
    async with valkey_store() as store:
        Console(width=140).print(*await measure(store))


if __name__ == "__main__":
    uvloop.run(_main())
