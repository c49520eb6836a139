"""Several routers decide like one, thanks to reservations and prefixes in flight; small, in one process.

`benchmarks/spread/` does the same with processes and prints all figures.
"""

import time
from contextlib import AsyncExitStack

import pytest

from benchmarks.spread.burst import OUTPUT_TOKENS, SCOPE, make_burst, write_fleet
from benchmarks.spread.router_process import VARIANTS
from benchmarks.spread.simulation import Spread, simulate
from kvatlas.store.connection import Store
from router_client import Prompt, RouterClient, RouterSettings

pytestmark = pytest.mark.anyio

BURST = make_burst(requests=240, workers=4, prefixes=12)


async def spread_of(store: Store, url: str, routers: int, variant: str) -> Spread:
    """Let routers choose in turn, and release nothing."""
    await write_fleet(store, BURST, time.time_ns() // 1_000)
    settings = RouterSettings(booking=VARIANTS[variant], deadline_ms=None)
    placed = []
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(RouterClient.open(url, settings, wait=False)) for _ in range(routers)]
        for number in range(len(BURST.requests)):
            prompt = Prompt.of_tokens(SCOPE, BURST.prompt(number), output_tokens=OUTPUT_TOKENS)
            choice = await opened[number % routers].reserve(prompt)
            placed.append((number, choice.worker_id))
    return simulate(BURST, placed)


async def test_many_routers_decide_like_one(store: Store, valkey_url: str) -> None:
    one = await spread_of(store, valkey_url, 1, "all")
    many = await spread_of(store, valkey_url, 4, "all")
    assert many.fullest < 1.15 * one.fullest
    assert many.hit_rate >= one.hit_rate - 0.02


async def test_reservations_and_prefixes_in_flight_lower_the_fullest_load_and_the_ttft(
    store: Store, valkey_url: str
) -> None:
    both = await spread_of(store, valkey_url, 2, "all")
    blind = await spread_of(store, valkey_url, 2, "no reservations")
    assert blind.fullest > 1.2 * both.fullest
    assert blind.mean_ttft_ms > both.mean_ttft_ms
    apart = await spread_of(store, valkey_url, 2, "no prefixes in flight")
    assert apart.hit_rate < both.hit_rate - 0.02
    assert apart.copies > both.copies + 0.5
    assert apart.mean_ttft_ms > both.mean_ttft_ms
