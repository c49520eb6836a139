"""How near learned rates come to the true ones: `python -m benchmarks.learning`.

The whole system, every part a process: simulated engines of different speed, a sidecar each, an indexer, and a router that
is followed in turn, so that every engine gets 200 requests over HTTP. Then what the store knows of each engine's rates is
put beside what the engine was started with.
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
from kvatlas.fleet.store import FleetStore
from kvatlas.identity import Scope
from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import open_store
from simulator.demo.processes import FleetSettings, running_fleet
from simulator.engine.step_cost import StepCost

MODEL = "learned"
SCOPE = Scope(MODEL, MODEL)
TRUE = (
    StepCost(20.0, 4_000.0, 50.0, 0.02, 55.0),
    StepCost(45.0, 8_000.0, 50.0, 0.02, 55.0),
    StepCost(120.0, 16_000.0, 100.0, 0.04, 55.0),
)
REQUESTS = 200
A_SECOND = 6.0
ROUTABLE_S = 30.0
TOLD_S = 3.0
"""A router tells the store each second."""


async def learned_rates(requests: int = REQUESTS) -> list[LearnedRates]:
    """Of each of TRUE's engines, from so many requests each."""
    router = {"router": ["--follow", "round_robin", "--decision-deadline-ms", "200"]}
    each = [[word for name, value in asdict(cost).items() for word in (_flag(name), str(value))] for cost in TRUE]
    with tempfile.TemporaryDirectory(prefix="kvatlas-learning-") as folder:
        settings = FleetSettings(MODEL, len(TRUE), 1, ["--num-gpu-blocks", "16384"], router, each)
        async with running_fleet(settings, Path(folder)) as fleet:
            store = await open_store(fleet.redis_url, wait=False)
            try:
                await _until_routable(FleetStore(store))
                await _drive(fleet.routers["router"], requests * len(TRUE))
                await asyncio.sleep(TOLD_S)
                evidence = await RedisReservations(store).read_evidence(SCOPE.pool_id)
            finally:
                await store.close()
    usual = EngineRates()
    return [
        learned_rates_of(estimate_of(evidence.get(worker_id, Evidence()), usual), usual)
        for worker_id in sorted(fleet.engines)
    ]


def errors(found: EngineRates, true: StepCost) -> dict[str, float]:
    """Relative, by what usual requests take."""
    off = {}
    for tokens in (512, 2_048):
        off[f"prefill of {tokens:,}"] = found.prefill_us(tokens, 0) / (true.prefill_us_per_token * tokens) - 1
    for running, kv_tokens in ((1, 1_000), (4, 6_000)):
        took = true.step_us(prefill_tokens=0, decode_sequences=running, decode_kv_tokens=kv_tokens, swapped_in=0)
        expected = found.tpot_base_us + found.tpot_us_per_running * running + found.tpot_us_per_kv_token * kv_tokens
        off[f"token with {running} running"] = expected / took - 1
    return off


def results(found: Sequence[LearnedRates]) -> list[Result]:
    """The largest error of each engine, beside its budget."""
    return [
        Result(
            f"learned rates of an engine of {true.prefill_us_per_token:g} us a token, {REQUESTS} requests",
            100 * max(map(abs, errors(one.rates, true).values())),
            "% off",
            10.0,
        )
        for one, true in zip(found, TRUE, strict=True)
    ]


def show(found: Sequence[LearnedRates]) -> Table:
    """Every figure."""
    names = list(errors(EngineRates(), TRUE[0]))
    table = Table("prefill us/token", "learned", "decode step us", "learned", "requests used", *names)
    for one, true in zip(found, TRUE, strict=True):
        table.add_row(
            f"{true.prefill_us_per_token:g}",
            f"{one.rates.prefill_us_per_token:.1f}",
            f"{true.decode_step_us:,.0f}",
            f"{one.rates.tpot_base_us:,.0f}",
            str(one.requests),
            *(f"{off:+.1%}" for off in errors(one.rates, true).values()),
        )
    return table


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


async def _until_routable(fleet: FleetStore) -> None:
    async with asyncio.timeout(ROUTABLE_S):
        while sum(record.routable for record in (await fleet.all()).values()) < len(TRUE):
            await asyncio.sleep(0.1)


async def _drive(router_url: str, requests: int) -> None:
    """Streams of 128 to 4,096 new prompt tokens, coming at random."""
    random = Random(11)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with (
        httpx.AsyncClient(base_url=router_url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as asked,
    ):
        due = perf_counter()
        for _ in range(requests):
            tokens = [random.randrange(100_000) for _ in range(round(2 ** random.uniform(7, 12)))]
            body = {"model": MODEL, "prompt": tokens, "max_tokens": random.randrange(8, 100), "stream": True}
            await asyncio.sleep(max(0.0, due - perf_counter()))
            asked.create_task(_stream(client, body))
            due += random.expovariate(A_SECOND)


async def _stream(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


async def _main() -> None:
    Console(width=150).print(show(await learned_rates()))


if __name__ == "__main__":
    uvloop.run(_main())
