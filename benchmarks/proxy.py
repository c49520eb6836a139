"""What `kvatlas router` adds to a request, beside an engine asked directly and a bare reverse proxy of the same parts:
`python -m benchmarks.proxy`.

Requests to the three take turns, so that what else the machine does costs each the same; processor time tells most.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from time import perf_counter

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.result import quantile
from kvatlas.embedded import valkey_server
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.fleet.store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, open_store

READY_S = 30
MODEL = "bench"
REQUESTS = 200
WARM_UP = 20
PROMPT = "Which worker holds most of this prompt, and what would it cost on each of them? " * 40
"""3,240 bytes, each a token of the simulated engine."""


@dataclass(slots=True)
class _Side:
    """One way to the engine. `cpu_ms`: processor time of its process so far."""

    name: str
    url: str
    pid: int
    took_ms: list[float] = field(default_factory=list)
    cpu_before_ms: float = 0

    def cpu_ms(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a proxy adds to a request of one kind, and the processor time that it takes for each."""

    kind: str
    proxy: str
    mean_ms: float
    p50_ms: float
    p99_ms: float
    processor_ms: float

    @classmethod
    def of(cls, kind: str, side: _Side, direct: _Side) -> "Overhead":
        mine, bare = sorted(side.took_ms), sorted(direct.took_ms)
        return cls(
            kind,
            side.name,
            fmean(mine) - fmean(bare),
            quantile(mine, 0.5) - quantile(bare, 0.5),
            quantile(mine, 0.99) - quantile(bare, 0.99),
            (side.cpu_ms() - side.cpu_before_ms) / REQUESTS,
        )


async def measure(store: Store, redis_url: str) -> list[Overhead]:
    """For a text that the engine tokenizes and for token ids, whole and streamed."""
    await store.client.flushall()
    await open_redis_index(store, writer=True)
    async with AsyncExitStack() as stack:
        words = ["kvatlas_cli.main", "simulate-engine", "--model", MODEL, "--port", "0", "--speed-up", "1000000"]
        words += ["--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"]
        engine = await stack.enter_async_context(_process("the engine", words, r"engine at (\S+);"))
        await FleetStore(store).write({"w1": _record(engine.url)})
        words = ["benchmarks.bare_proxy", engine.url]
        bare = await stack.enter_async_context(_process("a bare proxy", words, r"(http\S+)"))
        words = ["kvatlas_cli.main", "router", "--port", "0", "--redis-url", redis_url]
        router = await stack.enter_async_context(_process("kvatlas router", words, r"router at (\S+);"))
        found = []
        for name, prompt in (("text", PROMPT), ("token ids", list(PROMPT.encode()))):
            for streamed in (False, True):
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "stream": streamed}
                kind = f"{name}, {'streamed' if streamed else 'whole'}"
                found += await _compare(kind, json.dumps(body).encode(), (engine, bare, router))
        return found


async def _compare(kind: str, payload: bytes, sides: Sequence[_Side]) -> list[Overhead]:
    for side in sides:
        side.took_ms.clear()
    async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
        for number in range(WARM_UP + REQUESTS):
            if number == WARM_UP:
                for side in sides:
                    side.took_ms.clear()
                    side.cpu_before_ms = side.cpu_ms()
            for side in sides:
                began = perf_counter()
                answer = await client.post(f"{side.url}/v1/completions", content=payload)
                side.took_ms.append((perf_counter() - began) * 1e3)
                answer.raise_for_status()
    direct, *proxies = sides
    return [Overhead.of(kind, side, direct) for side in proxies]


def show(found: Sequence[Overhead]) -> Table:
    """Every figure."""
    table = Table(
        *("request", "through", "mean", "p50", "p99", "processor"),
        title=f"added to a request, ms; {REQUESTS} of each kind",
    )
    for one in found:
        figures = (one.mean_ms, one.p50_ms, one.p99_ms, one.processor_ms)
        table.add_row(one.kind, one.proxy, *(f"{figure:.2f}" for figure in figures))
    return table


def _record(url: str) -> FleetRecord:
    endpoint = EngineEndpoint(
        id="w1", kind=EngineKind.VLLM, base_url=url, model_id=MODEL, tokenizer_id=MODEL, block_size=16
    )
    return FleetRecord(
        endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE, load=WorkerState(id="w1"), incarnation=1
    )


@asynccontextmanager
async def _process(name: str, words: Sequence[str], pattern: str) -> AsyncIterator[_Side]:
    """A module as a child process; the pattern finds its URL in a line of its output."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        *words,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_S):
            found = None
            while found is None:
                line = (await process.stdout.readline()).decode()
                if not line:
                    raise RuntimeError(f"{words[0]} ended before it was ready")
                found = re.search(pattern, line)
        drain = asyncio.create_task(process.stdout.read())
        yield _Side(name, found[1], process.pid)
        drain.cancel()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


async def _main() -> None:
    async with valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            found = await measure(store, valkey.url)
        finally:
            await store.close()
    Console(width=130).print(show(found))


if __name__ == "__main__":
    uvloop.run(_main())
