"""Compares learned rates with the true ones: `python -m benchmarks.learning`.

It runs the whole system, each part as a process: simulated engines of different speeds, a sidecar for each, an indexer, and a
router that follows round-robin, so every engine gets 200 requests over HTTP. Then the learned rates in the store are compared
with the engines' configured ones.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from time import perf_counter

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.result import Result
from kvatlas.cost import EngineRates
from kvatlas.cost.learned_rates import LearnedRates, estimate_of, learned_rates_of
from kvatlas.cost.regression import Evidence
from kvatlas.identity import Scope
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import connected_store
from kvatlas_simulator.demo.processes import FleetSettings, running_fleet, wait_until_routable
from kvatlas_simulator.engine.step_cost import StepCost

MODEL = "learned"
SCOPE = Scope(MODEL, MODEL)
TRUE = (
    StepCost(20.0, 4_000.0, 50.0, 0.02, 55.0),
    StepCost(45.0, 8_000.0, 50.0, 0.02, 55.0),
    StepCost(120.0, 16_000.0, 100.0, 0.04, 55.0),
)
REQUESTS = 200
REQUESTS_PER_S = 6.0
ROUTABLE_S = 30.0
REPORT_S = 3.0
"""Long enough for a router's report, which it writes to the store every second."""


async def measure() -> list[LearnedRates]:
    """The learned rates of each of TRUE's engines."""
    router = {"router": ["--follow", "round_robin", "--decision-deadline-ms", "200"]}
    each = [[arg for name, value in asdict(cost).items() for arg in (_flag(name), str(value))] for cost in TRUE]
    with tempfile.TemporaryDirectory(prefix="kvatlas-learning-") as folder:
        settings = FleetSettings(MODEL, len(TRUE), 1, ["--num-gpu-blocks", "16384"], router, each)
        async with (
            running_fleet(settings, Path(folder)) as fleet,
            connected_store(fleet.redis_url, wait=False) as store,
        ):
            await wait_until_routable(store, len(TRUE), ROUTABLE_S)
            await _send_requests(fleet.routers["router"], REQUESTS * len(TRUE))
            await asyncio.sleep(REPORT_S)
            evidence = await RedisReservations(store).read_evidence(SCOPE.pool_id)
    usual = EngineRates()
    return [
        learned_rates_of(estimate_of(evidence.get(worker_id, Evidence()), usual), usual)
        for worker_id in sorted(fleet.engines)
    ]


def relative_errors(learned: EngineRates, true: StepCost) -> dict[str, float]:
    """The relative error of the durations of typical prefills and tokens, by name."""
    found = {}
    for tokens in (512, 2_048):
        found[f"prefill of {tokens:,}"] = learned.prefill_us(tokens, 0) / (true.prefill_us_per_token * tokens) - 1
    for running, kv_tokens in ((1, 1_000), (4, 6_000)):
        true_us = true.step_us(prefill_tokens=0, decode_sequences=running, decode_kv_tokens=kv_tokens, swapped_in=0)
        learned_us = (
            learned.tpot_base_us + learned.tpot_us_per_running * running + learned.tpot_us_per_kv_token * kv_tokens
        )
        found[f"token with {running} running"] = learned_us / true_us - 1
    return found


def to_results(learned: Sequence[LearnedRates]) -> list[Result]:
    """The largest error for each engine, with its budget."""
    return [
        Result(
            f"learned rates of an engine of {true.prefill_us_per_token:g} us a token, {REQUESTS} requests",
            100 * max(map(abs, relative_errors(one.rates, true).values())),
            "% off",
            10.0,
        )
        for one, true in zip(learned, TRUE, strict=True)
    ]


def tabulate(learned: Sequence[LearnedRates]) -> Table:
    """Every figure."""
    names = list(relative_errors(EngineRates(), TRUE[0]))
    table = Table("prefill us/token", "learned", "decode step us", "learned", "requests used", *names)
    for one, true in zip(learned, TRUE, strict=True):
        table.add_row(
            f"{true.prefill_us_per_token:g}",
            f"{one.rates.prefill_us_per_token:.1f}",
            f"{true.decode_step_us:,.0f}",
            f"{one.rates.tpot_base_us:,.0f}",
            str(one.requests),
            *(f"{error:+.1%}" for error in relative_errors(one.rates, true).values()),
        )
    return table


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


async def _send_requests(router_url: str, requests: int) -> None:
    """Send streamed requests with 128 to 4,096 new prompt tokens, at random times."""
    random = Random(11)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with (
        httpx.AsyncClient(base_url=router_url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as open_requests,
    ):
        due = perf_counter()
        for _ in range(requests):
            tokens = [random.randrange(100_000) for _ in range(round(2 ** random.uniform(7, 12)))]
            body = {"model": MODEL, "prompt": tokens, "max_tokens": random.randrange(8, 100), "stream": True}
            await asyncio.sleep(max(0.0, due - perf_counter()))
            open_requests.create_task(_read_stream(client, body))
            due += random.expovariate(REQUESTS_PER_S)


async def _read_stream(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


async def _main() -> None:
    Console(width=150).print(tabulate(await measure()))


if __name__ == "__main__":
    uvloop.run(_main())
