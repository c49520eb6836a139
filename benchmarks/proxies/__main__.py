"""`python -m benchmarks.proxies [TARGET,...]`: prints what a request through each of these proxies costs (without a list, all
that are installed). Each takes half a minute in each of three turns."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.fleet_records import routable_record
from benchmarks.proxies import bodies
from benchmarks.proxies.engine import MODEL
from benchmarks.proxies.measure import CONNECTIONS, OPEN_STREAMS, chunk_us, open_streams, saturate
from benchmarks.proxies.targets import PEERS, TARGETS, Target, running, wait_until_ready
from benchmarks.stores import valkey_store
from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient

ENGINES = 4
TURNS = 3
SECONDS = 4.0
ROWS = (
    "small chat, us",
    "requests a second",
    "100 messages and tools, us",
    "a chunk, us",
    f"small chat with {OPEN_STREAMS} streams open, us",
    "a stream, KiB",
)


async def _measure(client: EngineClient, target: Target) -> dict[str, float]:
    small, tools = bodies.small(), bodies.with_tools()
    await saturate(client, target, small, 1, CONNECTIONS)
    first = await saturate(client, target, small, SECONDS, CONNECTIONS)
    second = await saturate(client, target, tools, SECONDS, CONNECTIONS)
    chunk = await chunk_us(client, target, SECONDS)
    memory = target.memory_kib()
    async with open_streams(client, target, OPEN_STREAMS):
        kib = (target.memory_kib() - memory) / OPEN_STREAMS
        third = await saturate(client, target, small, SECONDS, CONNECTIONS)
    return dict(zip(ROWS, (first.cpu_us, first.a_second, second.cpu_us, chunk, third.cpu_us, kib), strict=True))


async def _keep_fleet(store: Store, urls: Sequence[str]) -> None:
    """Write the workers' records again and again, as an indexer does."""
    fleet = FleetStore(store)
    while True:
        for number, url in enumerate(urls):
            record = routable_record(Scope(MODEL, MODEL), WorkerState(id=f"w{number}"), base_url=url)
            await fleet.write({f"w{number}": record})
        await asyncio.sleep(2)


async def _main(names: Sequence[str]) -> None:
    here, there = _cores()
    folder = Path(tempfile.mkdtemp(prefix="bench-proxies-"))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(EngineClient(AddressPolicy(near=True), timeout_s=60))
        store = await stack.enter_async_context(valkey_store())
        await open_redis_index(store, writer=True)
        ports = [free_port() for _ in range(ENGINES)]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        engine = [sys.executable, "-m", "benchmarks.proxies.engine", *map(str, ports)]
        log = folder / "engine.log"
        process = await stack.enter_async_context(running(engine, here, log))
        for url in urls:
            await wait_until_ready(client, url, process, log)
        keeping = asyncio.create_task(_keep_fleet(store, urls))
        stack.callback(keeping.cancel)
        targets = []
        for name in names:
            port = free_port()
            log = folder / f"{name}.log"
            process = await stack.enter_async_context(running(TARGETS[name](port, urls, store.url), there, log))
            targets.append(Target(name, process.pid, f"http://127.0.0.1:{port}"))
            await wait_until_ready(client, targets[-1].url, process, log)
        for turn in range(TURNS):
            for target in targets if turn % 2 == 0 else reversed(targets):
                measured = await _measure(client, target)
                found[target.name].append(measured)
                values = "; ".join(f"{name}: {value:,.0f}" for name, value in measured.items())
                print(f"turn {turn + 1} of {TURNS}, {target.name}: {values}", flush=True)
    table = Table("", *names, title=f"CPU time; median of {TURNS} turns (range)")
    for row in ROWS:
        cells = ([one[row] for one in found[name]] for name in names)
        table.add_row(row, *(f"{median(some):,.0f} ({min(some):,.0f} to {max(some):,.0f})" for some in cells))
    Console(width=150).print(table)


def _cores() -> tuple[int | None, int | None]:
    """One core for client and engines, and one for the proxies; none if the machine has only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None, None
    os.sched_setaffinity(0, {cores[0]})
    return cores[0], cores[1]


if __name__ == "__main__":
    chosen = [name for word in sys.argv[1:] for name in word.split(",")] or [
        name for name in TARGETS if name.startswith("kvatlas") or (PEERS / name).exists()
    ]
    if unknown := [name for name in chosen if name not in TARGETS]:
        sys.exit(f"unknown proxy {unknown[0]!r}; expected some of {', '.join(TARGETS)}")
    uvloop.run(_main(chosen))
