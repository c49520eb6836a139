"""How often an engine finds as many prompt tokens cached as the router had predicted: `python -m benchmarks.predictions`.

The whole path, each part a process of its own: conversations over HTTP through `kvatlas router`, simulated engines with a
real paged cache, their sidecars, indexers. Every answer that deviates is of a category (`Deviation`).
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
from kvatlas.fleet.store import FleetStore
from kvatlas.predictions.accuracy import MEANING, Deviation
from kvatlas.store.connection import open_store
from simulator.demo.load_generator import Outcome, send_workload
from simulator.demo.processes import FleetSettings, RunningFleet, running_fleet
from simulator.workload import WorkloadSettings, generate_workload

MODEL = "bench-model"
ENGINES, INDEXERS = 4, 2
READY_S = 30
POLL_S = 0.05
LEAST_EQUAL = 99.0


@dataclass(frozen=True, slots=True)
class Load:
    """`blocks`: of each engine's cache; requests come `speed_up` times as fast as they are told to."""

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
class Compared:
    """What came of one load."""

    load: Load
    outcomes: Sequence[Outcome]

    @property
    def equal_percent(self) -> float:
        return 100 * sum(one.deviation is Deviation.NONE for one in self.outcomes) / len(self.outcomes)

    @property
    def result(self) -> Result:
        name = f"predicted cached tokens equal the real ones, {self.load.name}"
        return Result(name, self.equal_percent, "% of requests", self.load.budget, at_least=True)


async def measure() -> list[Compared]:
    return [Compared(load, await _outcomes(load)) for load in LOADS]


def show(compared: Sequence[Compared]) -> Table:
    """Every figure: each request is of one row."""
    table = Table("requests", *(one.load.name for one in compared), title="cached tokens, predicted and real")
    counts = [Counter(outcome.deviation for outcome in one.outcomes) for one in compared]
    table.add_row("all", *(f"{len(one.outcomes):,}" for one in compared))
    table.add_row("predicted exactly", *(f"{one.equal_percent:.1f}%" for one in compared))
    for deviation, meaning in MEANING.items():
        table.add_row(meaning, *(str(count[deviation]) for count in counts))
    table.add_section()
    table.add_row("tokens predicted", *(f"{sum(o.predicted_tokens for o in one.outcomes):,}" for one in compared))
    table.add_row("tokens found cached", *(f"{sum(o.cached_tokens for o in one.outcomes):,}" for one in compared))
    return table


async def _outcomes(load: Load) -> list[Outcome]:
    workload = generate_workload(
        WorkloadSettings(
            seed=11,
            sessions=load.sessions,
            arrivals_per_s=load.sessions_per_s,
            turns=(2, 6),
            system_prompts=12,
            system_prompt_tokens=(1_024, 3_072),
            popularity_skew=0.6,
            user_tokens=(32, 256),
            answer_tokens=(16, 64),
            think_s=2.0,
        )
    )
    flags = ["--num-gpu-blocks", str(load.blocks), "--speed-up", str(load.speed_up)]
    # all parts share this machine: the store may have to wait for a core, and deadlines are not what is measured here
    settings = FleetSettings(MODEL, ENGINES, INDEXERS, flags, {"kvatlas": ["--decision-deadline-ms", "1000"]})
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="kvatlas-bench-") as folder:
        async with running_fleet(settings, Path(folder)) as fleet:
            await _ready(fleet)
            await send_workload(workload, MODEL, fleet.routers["kvatlas"], load.speed_up, outcomes.append)
    return outcomes


async def _ready(fleet: RunningFleet) -> None:
    """Returns when every engine may get requests, and the router knows their model."""
    store = await open_store(fleet.redis_url, wait=False)
    try:
        async with httpx.AsyncClient(base_url=fleet.routers["kvatlas"]) as client:
            with anyio.fail_after(READY_S):
                while sum(record.routable for record in (await FleetStore(store).all()).values()) < ENGINES:
                    await anyio.sleep(POLL_S)
                while not (await client.get("/v1/models")).json()["data"]:
                    await anyio.sleep(POLL_S)
    finally:
        await store.close()


async def _main() -> None:
    Console(width=130).print(show(await measure()))


if __name__ == "__main__":
    uvloop.run(_main())
