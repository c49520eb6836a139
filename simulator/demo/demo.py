"""Runs one workload twice over the same fleet, round-robin and then by kvatlas, and shows what the difference is."""

import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

import anyio
import httpx
from pydantic import Field
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvatlas.errors import KvatlasError
from kvatlas.fleet.store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.settings import ProcessSettings
from kvatlas.store.connection import Store, open_store
from kvatlas.validation import Count, Positive
from simulator.demo.driver import Outcome, drive
from simulator.demo.processes import FleetSettings, RunningFleet, running_fleet
from simulator.demo.report import Phase, picture, table
from simulator.workload import Workload, WorkloadSettings, generate

SETTLE_S = 20.0
_POLL_S = 0.05


MODEL = "demo-model"

SHARED_MACHINE = ["--decision-deadline-ms", "100", "--no-learn"]
"""All parts share this machine: the store may have to wait for a core, and which of four equal engines answers late is chance,
not something to learn from."""

ROUTERS = {
    # an equal hop: it decides and books in the same way, and sends each request to the next engine all the same
    "round-robin": [*SHARED_MACHINE, "--follow", "round_robin"],
    "kvatlas": SHARED_MACHINE,
}
"""The flags of each phase's router."""


class DemoSettings(ProcessSettings):
    """What is simulated. Times are the engines' own; `speed_up` makes them shorter for the spectator."""

    engines: Positive = Field(default=4, description="Simulated engines, each with its sidecar.")
    indexers: Positive = Field(default=2, description="Replicas of the indexer.")
    num_gpu_blocks: Positive = Field(default=1_536, description="Blocks of 16 tokens on each engine's GPU.")
    speed_up: float = Field(default=2.0, gt=0, le=1e3, description="Simulated seconds in one real second.")
    sessions: Positive = Field(default=72, description="Conversations, of 2 to 6 turns each.")
    seed: Count = Field(default=7, description="Seed of the workload.")
    picture: Path = Field(default=Path("kvatlas-demo.png"), description="Where the picture goes.")

    @property
    def workload(self) -> WorkloadSettings:
        return WorkloadSettings(
            seed=self.seed,
            sessions=self.sessions,
            arrivals_per_s=3.2,
            turns=(2, 6),
            system_prompts=12,
            system_prompt_tokens=(1_024, 3_072),
            popularity_skew=0.6,
            user_tokens=(32, 256),
            answer_tokens=(16, 64),
            think_s=2.0,
        )


async def run_demo(settings: DemoSettings, *, as_json: bool = False) -> None:
    """Print progress on stderr, a table (or JSON) on stdout, and the path of a picture. Leaves no process behind, also when
    cancelled.

    Raises KvatlasError for a part that does not come up or does not come to rest.
    """
    console = Console(stderr=True)
    workload = generate(settings.workload)
    console.print(
        f"starting NATS, Valkey, {settings.indexers} indexers, {settings.engines} simulated engines with sidecars, "
        f"{len(ROUTERS)} routers"
    )
    flags = ["--num-gpu-blocks", str(settings.num_gpu_blocks), "--speed-up", str(settings.speed_up)]
    fleet_settings = FleetSettings(MODEL, settings.engines, settings.indexers, flags, ROUTERS)
    with tempfile.TemporaryDirectory(prefix="kvatlas-demo-") as folder:
        async with running_fleet(fleet_settings, Path(folder)) as fleet, _watching(fleet) as watch:
            await watch.until_routable(len(fleet.engines))
            console.print(
                f"{workload.requests} requests of {len(workload.sessions)} conversations, "
                f"{settings.workload.system_prompts} system prompts; engines at {settings.speed_up:g} x speed"
            )
            phases = await _phases(console, settings, workload, fleet.routers, watch)
    picture(phases, settings.picture)
    if as_json:
        print(json.dumps([phase.to_jsonable() for phase in phases], indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else 100).print(table(phases))
    console.print(f"picture: {settings.picture.resolve()}")


async def _phases(
    console: Console, settings: DemoSettings, workload: Workload, routers: dict[str, str], watch: "_Watch"
) -> list[Phase]:
    phases = []
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("hit rate {task.fields[hits]:>6}  mean TTFT {task.fields[ttft]:>8}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, router_url in routers.items():
            await watch.clear_caches()
            before = await watch.lag_counts()
            bar = progress.add_task(name, total=workload.requests, hits="-", ttft="-")
            outcomes: list[Outcome] = []
            began = perf_counter()

            def on_outcome(outcome: Outcome, bar: int = bar, outcomes: list[Outcome] = outcomes) -> None:
                outcomes.append(outcome)
                so_far = Phase("", outcomes, 0, 0, None, None)
                hits, ttft = f"{so_far.hit_rate:.1%}", f"{so_far.mean_ttft_ms:,.0f} ms"
                progress.update(bar, advance=1, hits=hits, ttft=ttft)  # type: ignore[arg-type]

            await drive(workload, MODEL, router_url, settings.speed_up, on_outcome)
            seconds = perf_counter() - began
            blocks = await watch.blocks_at_rest()
            bounds, counts = await watch.lag_counts()
            lag = [count - earlier for count, earlier in zip(counts, before[1], strict=True)]
            phases.append(Phase(name, outcomes, seconds, blocks, _bound(bounds, lag, 0.5), _bound(bounds, lag, 0.99)))
    return phases


def _bound(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """The upper bound of the histogram bucket that holds the quantile."""
    total, seen = sum(counts), 0
    for bound, count in zip([*bounds, float("inf")], counts, strict=True):
        seen += count
        if total and seen >= q * total:
            return bound
    return None


class _Watch:
    """What the demo asks of the running fleet."""

    def __init__(self, fleet: RunningFleet, http: httpx.AsyncClient, store: Store) -> None:
        self._fleet = fleet
        self._http = http
        self._store = store

    async def until_routable(self, workers: int) -> None:
        with anyio.move_on_after(SETTLE_S):
            while True:
                records = await FleetStore(self._store).all()
                if sum(record.routable for record in records.values()) == workers:
                    return
                await anyio.sleep(_POLL_S)
        raise KvatlasError(f"not all of {workers} workers were seen by the indexers in {SETTLE_S:g} s")

    async def clear_caches(self) -> None:
        """Equal, cold caches: every engine forgets everything, and the index says so."""
        for url in self._fleet.engines.values():
            (await self._http.post(f"{url}/reset_prefix_cache")).raise_for_status()
        index = await open_redis_index(self._store, writer=False)
        with anyio.move_on_after(SETTLE_S):
            while await index.length():
                await anyio.sleep(_POLL_S)
            return
        raise KvatlasError(f"the index still shows cached blocks {SETTLE_S:g} s after the engines were cleared")

    async def blocks_at_rest(self) -> int:
        """Blocks in the index once its number does not change any more."""
        index = await open_redis_index(self._store, writer=False)
        before = -1
        while (now := await index.length()) != before:
            before = now
            await anyio.sleep(0.2)
        return now

    async def lag_counts(self) -> tuple[list[float], list[int]]:
        """(bucket bounds in ms, counts) of the event lag of all indexers together."""
        bounds: list[float] = []
        total: list[int] = []
        for url in self._fleet.status_urls:
            lag = (await self._http.get(f"{url}/status")).raise_for_status().json()["counters"]["event_lag"]
            bounds = lag["buckets_ms"]
            total = [a + b for a, b in zip(total or [0] * len(lag["counts"]), lag["counts"], strict=True)]
        return bounds, total


@asynccontextmanager
async def _watching(fleet: RunningFleet) -> AsyncIterator[_Watch]:
    store = await open_store(fleet.redis_url, wait=False)
    try:
        async with httpx.AsyncClient(timeout=10) as http:
            yield _Watch(fleet, http, store)
    finally:
        await store.close()
