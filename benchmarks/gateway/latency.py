"""Added time and CPU time per request: Envoy alone, Envoy with `kvatlas epp`, and `kvatlas router`.

First, requests to a simulated engine go through each in turn, one at a time, to measure the time added to a direct request.
Then, for some seconds, as many requests as possible go through each to an engine that takes no time (Envoy's own answer), to
measure requests per second, and each process' CPU time per request. CPU time is the most reliable figure.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import httpx
from rich.table import Table

from benchmarks.child_processes import server_process
from benchmarks.fleet_records import routable_record
from benchmarks.gateway.envoy import EnvoyProcess, Listener
from benchmarks.process_usage import usage_of
from benchmarks.timing import quantile
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

MODEL = "bench"
SCOPE = Scope(MODEL, MODEL)
PROMPT = [token % 30_000 for token in range(512)]
EVENTS = 64
REQUESTS = 150
WARM_UP = 15
CONNECTIONS = 16
SECONDS = 3.0
ALONE = "Envoy alone"
ROUTER = "kvatlas router"
PICKERS = {
    "epp, whole answer": ("whole", True),
    "epp, headers only": ("whole", False),
    "epp, leaves": ("none", False),
}
"""(`--response-mode`, true if Envoy sends the picker the answer's body), by name."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures for one way to the engine. `cpu_ms`: CPU time per request, by process."""

    name: str
    added_p50_ms: Mapping[str, float]
    added_p99_ms: Mapping[str, float]
    requests_per_s: float
    cpu_ms: Mapping[str, float]


async def measure(store: Store) -> list[Figures]:
    """Measure with requests of 512 token ids."""
    await store.client.flushall()
    await open_redis_index(store, writer=True)
    async with AsyncExitStack() as stack:
        args = ["simulate-engine", "--model", MODEL, "--port", "0", "--speed-up", "1000000", "--block-size", "16"]
        args += ["--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"]
        engine = await stack.enter_async_context(server_process("kvatlas_cli.main", args, r"engine at (\S+);"))
        await _serve_from(store, engine.announced)
        common = ["--redis-url", store.url, "--tokenizer", "none", "--no-learn", "--log-level", "warning"]
        listeners = {ALONE: Listener(None)}
        pids: dict[str, int] = {}
        for name, (mode, bodies) in PICKERS.items():
            args = ["epp", *common, "--port", "0", "--health-port", "0", "--response-mode", mode, "--drain-s", "0"]
            process = await stack.enter_async_context(server_process("kvatlas_cli.main", args, r"picker on port (\d+)"))
            listeners[name] = Listener(int(process.announced), bodies)
            pids[name] = process.pid
        args = ["router", *common, "--port", "0", "--drain-s", "0", "--no-access-log"]
        router = await stack.enter_async_context(server_process("kvatlas_cli.main", args, r"router at (\S+);"))
        pids[ROUTER] = router.pid
        envoy = stack.enter_context(EnvoyProcess(listeners))
        urls = {**envoy.urls, ROUTER: router.announced}
        added = {
            kind: await _compare(urls, engine.announced, streamed=streamed)
            for kind, streamed in (("whole", False), ("streamed", True))
        }
        await _serve_from(store, envoy.engine_url)
        found = []
        for name, url in urls.items():
            processes = {name: pids[name]} if name in pids else {}
            if name != ROUTER:
                processes["Envoy"] = envoy.pid
            rate, cpu_ms = await _throughput(url, envoy.engine_url, processes)
            p50 = {kind: times[name][0] for kind, times in added.items()}
            p99 = {kind: times[name][1] for kind, times in added.items()}
            found.append(Figures(name, p50, p99, rate, cpu_ms))
        return found


async def _serve_from(store: Store, url: str) -> None:
    """Make this the fleet's only worker; routers read it within two seconds."""
    await FleetStore(store).write({"w1": routable_record(SCOPE, WorkerState(id="w1"), base_url=url)})
    await asyncio.sleep(2.5)


def _request(*, streamed: bool) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": EVENTS if streamed else 1,
        "stream": streamed,
    }
    return json.dumps(body).encode()


def _headers(engine_url: str) -> dict[str, str]:
    """Headers for Envoy without a picker; the picker's choice replaces them."""
    engine = engine_url.removeprefix("http://")
    return {"content-type": "application/json", "x-gateway-destination-endpoint": engine}


async def _compare(urls: Mapping[str, str], engine_url: str, *, streamed: bool) -> Mapping[str, tuple[float, float]]:
    """(p50, p99) of the time added to a direct request, by name."""
    payload, headers = _request(streamed=streamed), _headers(engine_url)
    ways = {"": engine_url, **urls}
    times: dict[str, list[float]] = {name: [] for name in ways}
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for number in range(WARM_UP + REQUESTS):
            for name, url in ways.items():
                began = perf_counter()
                response = await client.post(f"{url}/v1/completions", content=payload, headers=headers)
                took_ms = (perf_counter() - began) * 1e3
                response.raise_for_status()
                if number >= WARM_UP:
                    times[name].append(took_ms)
    direct = sorted(times.pop(""))
    return {
        name: (
            quantile(sorted(mine), 0.5) - quantile(direct, 0.5),
            quantile(sorted(mine), 0.99) - quantile(direct, 0.99),
        )
        for name, mine in times.items()
    }


async def _throughput(url: str, engine_url: str, processes: Mapping[str, int]) -> tuple[float, Mapping[str, float]]:
    """Requests per second over CONNECTIONS connections, and CPU time per request."""
    payload, headers = _request(streamed=False), _headers(engine_url)
    done = 0

    async def run(client: httpx.AsyncClient, until: float) -> None:
        nonlocal done
        while perf_counter() < until:
            (await client.post(f"{url}/v1/completions", content=payload, headers=headers)).raise_for_status()
            done += 1

    limits = httpx.Limits(max_connections=CONNECTIONS)
    async with httpx.AsyncClient(timeout=30, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(run(client, perf_counter() + 0.5) for _ in range(CONNECTIONS)))
        done = 0
        before = {name: usage_of(pid).cpu_s for name, pid in processes.items()}
        began = perf_counter()
        await asyncio.gather(*(run(client, began + SECONDS) for _ in range(CONNECTIONS)))
        took_s = perf_counter() - began
    cpu_ms = {name: (usage_of(pid).cpu_s - before[name]) * 1e3 / done for name, pid in processes.items()}
    return done / took_s, cpu_ms


def tabulate(found: Sequence[Figures]) -> Table:
    """Every figure."""
    table = Table(
        "through",
        "added p50 / p99",
        f"{EVENTS} events: p50 / p99",
        "requests/s",
        "processor a request",
        title=f"a request of {len(PROMPT)} tokens, ms; {REQUESTS} of each, then {CONNECTIONS} connections for {SECONDS:g} s",
    )
    for one in found:
        cpu = ", ".join(f"{'picker' if name in PICKERS else name} {ms:.2f}" for name, ms in one.cpu_ms.items())
        times = [f"{one.added_p50_ms[kind]:.2f} / {one.added_p99_ms[kind]:.2f}" for kind in ("whole", "streamed")]
        table.add_row(one.name, *times, f"{one.requests_per_s:,.0f}", cpu)
    return table
