"""How often an engine finds exactly as many cached prompt tokens as the router predicted: `python -m benchmarks.predictions`.

It runs the whole path, each part as its own process: conversations over HTTP through `kvatlas router`, simulated engines with a
real paged cache, their sidecars, and indexers. Each request that deviates is counted under one `Deviation`.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.result import Result
from kvatlas.predictions.accuracy import MEANING, Deviation
from kvatlas.store.connection import connected_store
from kvatlas_simulator.demo.load_generator import Outcome, send_workload
from kvatlas_simulator.demo.processes import FleetSettings, RunningFleet, running_fleet, wait_until_routable
from kvatlas_simulator.workload import chat_settings, generate_workload

MODEL = "bench-model"
ENGINES, INDEXERS = 4, 2
READY_S = 30
POLL_S = 0.05
LEAST_EQUAL = 99.0


@dataclass(frozen=True, slots=True)
class Load:
    """`blocks`: in each engine's cache. `sessions_per_s`: in simulated time, which runs `speed_up` times as fast as real
    time."""

    name: str
    blocks: int
    sessions: int
    sessions_per_s: float
    speed_up: float
    budget: float | None = None


LOADS = (
    Load("moderate load", 2_048, 120, 3.0, 2.0, LEAST_EQUAL),
    Load("caches a third as large", 704, 120, 3.0, 2.0),
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The outcomes under one load."""

    load: Load
    outcomes: Sequence[Outcome]

    @property
    def equal_percent(self) -> float:
        return 100 * sum(one.deviation is Deviation.NONE for one in self.outcomes) / len(self.outcomes)


async def measure() -> list[Accuracy]:
    return [Accuracy(load, await _run(load)) for load in LOADS]


def to_results(accuracies: Sequence[Accuracy]) -> list[Result]:
    """The share of exact predictions under each load."""
    return [
        Result(
            f"predicted cached tokens equal the real ones, {one.load.name}",
            one.equal_percent,
            "% of requests",
            one.load.budget,
            at_least=True,
        )
        for one in accuracies
    ]


def tabulate(accuracies: Sequence[Accuracy]) -> Table:
    """All figures; each request is counted in one row."""
    table = Table("requests", *(one.load.name for one in accuracies), title="cached tokens, predicted and real")
    counts = [Counter(outcome.deviation for outcome in one.outcomes) for one in accuracies]
    table.add_row("all", *(f"{len(one.outcomes):,}" for one in accuracies))
    table.add_row("predicted exactly", *(f"{one.equal_percent:.1f}%" for one in accuracies))
    for deviation, meaning in MEANING.items():
        table.add_row(meaning, *(str(count[deviation]) for count in counts))
    table.add_section()
    table.add_row("tokens predicted", *(f"{sum(o.predicted_tokens for o in one.outcomes):,}" for one in accuracies))
    table.add_row("tokens found cached", *(f"{sum(o.cached_tokens for o in one.outcomes):,}" for one in accuracies))
    return table


async def _run(load: Load) -> list[Outcome]:
    workload = generate_workload(chat_settings(seed=11, sessions=load.sessions, arrivals_per_s=load.sessions_per_s))
    flags = ["--num-gpu-blocks", str(load.blocks), "--speed-up", str(load.speed_up)]
    # all parts share this machine: the store may have to wait for a core, and deadlines are not measured here
    settings = FleetSettings(MODEL, ENGINES, INDEXERS, flags, {"kvatlas": ["--decision-deadline-ms", "1000"]})
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as folder:
        async with running_fleet(settings, Path(folder)) as fleet:
            await _wait_until_ready(fleet)
            await send_workload(workload, MODEL, fleet.routers["kvatlas"], load.speed_up, outcomes.append)
    return outcomes


async def _wait_until_ready(fleet: RunningFleet) -> None:
    """Wait until every engine is routable, and the router knows their model."""
    async with connected_store(fleet.redis_url, wait=False) as store:
        await wait_until_routable(store, ENGINES, READY_S)
    async with httpx.AsyncClient(base_url=fleet.routers["kvatlas"]) as client:
        with anyio.fail_after(READY_S):
            while not (await client.get("/v1/models")).json()["data"]:
                await anyio.sleep(POLL_S)


async def _main() -> None:
    Console(width=130).print(tabulate(await measure()))


if __name__ == "__main__":
    uvloop.run(_main())
