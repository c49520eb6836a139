"""Runs one workload on the same fleet, routed round-robin and then by kvatlas, and shows the difference."""

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import anyio
import httpx
from pydantic import Field, field_validator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvatlas.errors import KvatlasError
from kvatlas.index.redis.index import open_redis_index
from kvatlas.settings import CommaList, ProcessSettings
from kvatlas.store.connection import Store, connected_store
from kvatlas.validation import Count, Positive
from kvatlas_simulator.demo.load_generator import Outcome, send_workload
from kvatlas_simulator.demo.processes import FleetSettings, RunningFleet, running_fleet, wait_until_routable
from kvatlas_simulator.demo.report import Phase, build_table
from kvatlas_simulator.hybrid_cache.groups import parse_groups
from kvatlas_simulator.workload import Workload, WorkloadSettings, chat_settings, generate_workload

SETTLE_S = 20.0
_POLL_S = 0.05

MODEL = "demo-model"

SHARED_MACHINE = ["--decision-deadline-ms", "1000", "--no-learn"]
"""All parts share this machine, so the store may have to wait for a core. Which of four equal engines answers late is
chance, so the router must not learn from it."""

ROUTERS = {
    # the same hop: this router decides and books in the same way, but sends each request to the next engine
    "round-robin": [*SHARED_MACHINE, "--follow", "round_robin"],
    "kvatlas": SHARED_MACHINE,
}
"""The flags of each phase's router."""

RESIDENCY = {"by residency": [*SHARED_MACHINE, "--no-marks"]}
"""An additional router for hybrid engines, which chooses like a router that knows only the blocks of full attention."""


class DemoSettings(ProcessSettings):
    """Settings of the simulation. Times are the engines' own; `speed_up` shortens them."""

    engines: Positive = Field(default=4, description="Simulated engines, each with its sidecar.")
    indexers: Positive = Field(default=2, description="Replicas of the indexer.")
    num_gpu_blocks: Positive = Field(default=1_536, description="Blocks of 16 tokens on each engine's GPU.")
    groups: CommaList = Field(
        default=("full",),
        description="KV cache groups of the model, separated by commas: full, swa:WINDOW, chunked:SIZE, mamba. With several "
        "of them the workload is also routed by residency alone.",
    )
    speed_up: float = Field(default=2.0, gt=0, le=1e3, description="Simulated seconds per real second.")
    sessions: Positive = Field(default=72, description="Conversations, of 2 to 6 turns each.")
    seed: Count = Field(default=7, description="Seed of the workload.")

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: tuple[str, ...]) -> tuple[str, ...]:
        parse_groups(groups)
        return groups

    @property
    def routers(self) -> dict[str, Sequence[str]]:
        """The flags of each phase's router, by the phase's name."""
        first, *rest = ROUTERS.items()
        return dict((first, *RESIDENCY.items(), *rest)) if len(self.groups) > 1 else {**ROUTERS}

    @property
    def workload(self) -> WorkloadSettings:
        return chat_settings(seed=self.seed, sessions=self.sessions, arrivals_per_s=3.2)


async def run_demo(settings: DemoSettings, *, as_json: bool = False) -> None:
    """Print progress on stderr and a table (or JSON) on stdout. Leaves no process behind, even if cancelled.

    Raises KvatlasError if a part does not start, or if the fleet does not settle.
    """
    console = Console(stderr=True)
    workload = generate_workload(settings.workload)
    console.print(
        f"starting NATS, Valkey, {settings.indexers} indexers, {settings.engines} simulated engines with sidecars, "
        f"{len(settings.routers)} routers"
    )
    flags = ["--num-gpu-blocks", str(settings.num_gpu_blocks), "--speed-up", str(settings.speed_up)]
    flags += ["--groups", ",".join(settings.groups)]
    chunks = [text.partition(":")[2] for text in settings.groups if text.startswith("chunked:")]
    fleet_settings = FleetSettings(
        MODEL,
        settings.engines,
        settings.indexers,
        flags,
        settings.routers,
        sidecar_flags=["--chunk-size", chunks[0]] if chunks else [],
    )
    with tempfile.TemporaryDirectory(prefix="kvatlas-demo-") as folder:
        async with running_fleet(fleet_settings, Path(folder)) as fleet, open_probe(fleet) as probe:
            await wait_until_routable(probe.store, len(fleet.engines), SETTLE_S)
            console.print(
                f"{workload.requests} requests of {len(workload.sessions)} conversations, "
                f"{settings.workload.system_prompts} system prompts; simulated engines run at {settings.speed_up:g} x speed"
            )
            phases = await run_phases(console, settings, workload, fleet.routers, probe)
    if as_json:
        print(json.dumps([phase.to_jsonable() for phase in phases], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 100).print(build_table(phases))


async def run_phases(
    console: Console, settings: DemoSettings, workload: Workload, routers: dict[str, str], probe: "FleetProbe"
) -> list[Phase]:
    """Run the workload through each router, starting with empty caches."""
    phases = []
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[hits]:>6} cached, first token after {task.fields[ttft]:>6}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, router_url in routers.items():
            await probe.clear_caches()
            _, lag_before = await probe.event_lag()
            bar = progress.add_task(name, total=workload.requests, hits="-", ttft="-")
            outcomes: list[Outcome] = []
            began = perf_counter()

            def on_outcome(outcome: Outcome, bar: int = bar, outcomes: list[Outcome] = outcomes) -> None:
                outcomes.append(outcome)
                so_far = Phase("", outcomes, 0, 0, None, None)
                hits, ttft = f"{so_far.hit_rate:.1%}", f"{so_far.mean_ttft_ms:,.0f} ms"
                progress.update(bar, advance=1, hits=hits, ttft=ttft)  # type: ignore[arg-type]

            await send_workload(workload, MODEL, router_url, settings.speed_up, on_outcome)
            seconds = perf_counter() - began
            blocks = await probe.settled_blocks()
            bounds, counts = await probe.event_lag()
            lag = [count - before for count, before in zip(counts, lag_before, strict=True)]
            p50_ms, p99_ms = _quantile_bound(bounds, lag, 0.5), _quantile_bound(bounds, lag, 0.99)
            phases.append(Phase(name, outcomes, seconds, blocks, p50_ms, p99_ms))
    return phases


def _quantile_bound(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """The upper bound of the histogram bucket that holds the quantile; None if the histogram is empty."""
    total, seen = sum(counts), 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        seen += count
        if total and seen >= q * total:
            return bound
    return None


class FleetProbe:
    """Reads the state of the running fleet, and clears its caches."""

    def __init__(self, fleet: RunningFleet, http: httpx.AsyncClient, store: Store) -> None:
        self._fleet = fleet
        self._http = http
        self.store = store

    async def clear_caches(self) -> None:
        """Empty every engine's cache, and wait until the index is empty too."""
        for url in self._fleet.engines.values():
            (await self._http.post(f"{url}/reset_prefix_cache")).raise_for_status()
        index = await open_redis_index(self.store, writer=False)
        with anyio.move_on_after(SETTLE_S):
            while await index.length():
                await anyio.sleep(_POLL_S)
            return
        raise KvatlasError(f"the index still has blocks {SETTLE_S:g} s after the engines' caches were cleared")

    async def settled_blocks(self) -> int:
        """Number of blocks in the index, once there are some and it no longer changes."""
        index = await open_redis_index(self.store, writer=False)
        before = 0
        with anyio.move_on_after(SETTLE_S):
            while (now := await index.length()) != before or not now:
                before = now
                await anyio.sleep(0.2)
        return before

    async def event_lag(self) -> tuple[list[float], list[int]]:
        """The histogram of the event lag over all indexers: bucket bounds in ms, and counts."""
        bounds: list[float] = []
        total: list[int] = []
        for url in self._fleet.status_urls:
            lag = (await self._http.get(f"{url}/status")).raise_for_status().json()["counters"]["event_lag"]
            bounds = lag["buckets_ms"]
            total = [a + b for a, b in zip(total or [0] * len(lag["counts"]), lag["counts"], strict=True)]
        return bounds, total


@asynccontextmanager
async def open_probe(fleet: RunningFleet) -> AsyncIterator[FleetProbe]:
    """Open a probe that is connected to the fleet's parts."""
    async with connected_store(fleet.redis_url, wait=False) as store, httpx.AsyncClient(timeout=10) as http:
        yield FleetProbe(fleet, http, store)
