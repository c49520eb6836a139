"""The overhead that `kvatlas router` adds to a request, compared with calling the engine directly and through a bare reverse
proxy.

Requests to the three take turns, so that other load on the machine affects each equally. CPU time is the most reliable
figure.
"""

import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import perf_counter

import httpx
from rich.table import Table

from benchmarks.child_processes import ServerProcess, server_process
from benchmarks.fleet_records import routable_record
from benchmarks.timing import quantile
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

MODEL = "bench"
REQUESTS = 200
WARM_UP = 20
PROMPT = "Which worker holds most of this prompt, and what would it cost on each of them? " * 40
"""3,240 bytes, each a token of the simulated engine."""


@dataclass(slots=True)
class _Target:
    """One way to the engine, through a process that announces a URL."""

    name: str
    process: ServerProcess
    times_ms: list[float] = field(default_factory=list)
    cpu_before_ms: float = 0

    def cpu_ms(self) -> float:
        """The CPU time of its process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a proxy adds to a request of one kind, and its CPU time per request."""

    kind: str
    proxy: str
    mean_ms: float
    p50_ms: float
    p99_ms: float
    processor_ms: float

    @classmethod
    def of(cls, kind: str, proxy: _Target, direct: _Target) -> "Overhead":
        mine, bare = sorted(proxy.times_ms), sorted(direct.times_ms)
        return cls(
            kind,
            proxy.name,
            fmean(mine) - fmean(bare),
            quantile(mine, 0.5) - quantile(bare, 0.5),
            quantile(mine, 0.99) - quantile(bare, 0.99),
            (proxy.cpu_ms() - proxy.cpu_before_ms) / REQUESTS,
        )


async def measure(store: Store) -> list[Overhead]:
    """Measure with text that the engine tokenizes and with token ids, unstreamed and streamed."""
    await store.client.flushall()
    await open_redis_index(store, writer=True)
    async with AsyncExitStack() as stack:
        args = ["simulate-engine", "--model", MODEL, "--port", "0", "--speed-up", "1000000"]
        args += ["--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"]
        engine = await stack.enter_async_context(server_process("kvatlas_cli.main", args, r"engine at (\S+);"))
        record = routable_record(Scope(MODEL, MODEL), WorkerState(id="w1"), base_url=engine.announced)
        await FleetStore(store).write({"w1": record})
        args = [engine.announced]
        bare = await stack.enter_async_context(server_process("benchmarks.proxy.bare_proxy", args, r"(http\S+)"))
        args = ["router", "--port", "0", "--redis-url", store.url]
        router = await stack.enter_async_context(server_process("kvatlas_cli.main", args, r"router at (\S+);"))
        targets = (_Target("the engine", engine), _Target("a bare proxy", bare), _Target("kvatlas router", router))
        found = []
        for name, prompt in (("text", PROMPT), ("token ids", list(PROMPT.encode()))):
            for streamed in (False, True):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": streamed}
                kind = f"{name}, {'streamed' if streamed else 'whole'}"
                found += await _compare(kind, json.dumps(body).encode(), targets)
        return found


async def _compare(kind: str, payload: bytes, targets: Sequence[_Target]) -> list[Overhead]:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for number in range(WARM_UP + REQUESTS):
            if number in (0, WARM_UP):
                for target in targets:
                    target.times_ms.clear()
                    target.cpu_before_ms = target.cpu_ms()
            for target in targets:
                began = perf_counter()
                response = await client.post(f"{target.process.announced}/v1/completions", content=payload)
                target.times_ms.append((perf_counter() - began) * 1e3)
                response.raise_for_status()
    direct, *proxies = targets
    return [Overhead.of(kind, proxy, direct) for proxy in proxies]


def tabulate(found: Sequence[Overhead]) -> Table:
    """Every figure."""
    table = Table(
        *("request", "through", "mean", "p50", "p99", "processor"),
        title=f"added to a request, ms; {REQUESTS} of each kind",
    )
    for one in found:
        figures = (one.mean_ms, one.p50_ms, one.p99_ms, one.processor_ms)
        table.add_row(one.kind, one.proxy, *(f"{figure:.2f}" for figure in figures))
    return table
