"""Clients that send streamed completions at random times, and record what they see."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any

import anyio
import httpx

from benchmarks.timing import quantile
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas_simulator.service import EngineAddresses, run_engine
from kvatlas_simulator.settings import EngineSettings

TIMEOUT_S = 120.0
ANY_PORT = "tcp://127.0.0.1:0"


@dataclass(slots=True)
class Seen:
    """One request. `error`: why it was lost. `worker`: from the decision header. Token counts are as the engine reports
    them."""

    kind: str = ""
    worker: str = ""
    ttft_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    attempts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What one client sends: a prompt, additional headers, and the name of its kind in the results."""

    prompt: Sequence[int]
    max_tokens: int
    headers: dict[str, str] = field(default_factory=dict)
    kind: str = ""


async def send(
    urls: Sequence[str], model: str, requests: Sequence[Request], per_s: float, random: Random
) -> list[Seen]:
    """Send each request at its time to the next URL, as a round-robin balancer does."""
    seen = [Seen(request.kind) for request in requests]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=512)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        due = perf_counter()
        async with asyncio.TaskGroup() as running:
            for number, request in enumerate(requests):
                await asyncio.sleep(max(0.0, due - perf_counter()))
                running.create_task(_ask(client, urls[number % len(urls)], model, request, seen[number]))
                due += random.expovariate(per_s)
    return seen


async def _ask(client: httpx.AsyncClient, url: str, model: str, request: Request, seen: Seen) -> None:
    body = {"model": model, "prompt": list(request.prompt), "max_tokens": request.max_tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    began, text = perf_counter(), ""
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body, headers=request.headers) as answer:
            async for part in answer.aiter_text():
                seen.ttft_s = seen.ttft_s or perf_counter() - began
                text += part
    except httpx.HTTPError as error:
        seen.error = f"{type(error).__name__}: {error}"
        return
    if answer.status_code != 200 or not text.endswith("data: [DONE]\n\n"):
        seen.error = f"{answer.status_code}: {text[-200:]}"
        return
    name, _, parameters = answer.headers["x-kvatlas-decision"].partition(";")
    seen.worker = name.strip('"')
    seen.attempts = int(dict(part.split("=", 1) for part in parameters.split(";"))["attempt"])
    usage: dict[str, Any] = json.loads(text.split("\n\n")[-3].removeprefix("data: "))["usage"]
    seen.prompt_tokens, seen.cached_tokens = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def ttft_ms(seen: Sequence[Seen], q: float) -> float:
    """A quantile of the times to the first token of answered requests; 0 if none was answered."""
    times = sorted(one.ttft_s for one in seen if not one.error)
    return quantile(times, q) * 1_000 if times else 0.0


@asynccontextmanager
async def running_engines(model: str, count: int, **settings: Any) -> AsyncIterator[list[str]]:
    """Run simulated engines in this process; yields their URLs."""
    loaded = EngineSettings.load(model=model, port=0, endpoint=ANY_PORT, replay_endpoint=ANY_PORT, **settings)
    async with anyio.create_task_group() as tasks:
        urls: list[str] = []
        for _ in range(count):
            started: asyncio.Future[EngineAddresses] = asyncio.get_running_loop().create_future()
            tasks.start_soon(run_engine, loaded, started.set_result)
            urls.append((await started).base_url)
        yield urls
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def repeating(work: Callable[[], Awaitable[None]], every_s: float) -> AsyncIterator[None]:
    """Do the work once before the block, then repeatedly while the block runs."""

    async def repeat() -> None:
        while task.running:
            await asyncio.sleep(every_s)
            await work()

    task = BackgroundTask(repeat, "repeated work of a benchmark")
    await work()
    task.start()
    try:
        yield
    finally:
        await task.stop()
