"""Three routers behind a balancer are replaced one by one while clients read streams through them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Protocol

import anyio
import httpx
from anyio.abc import TaskGroup
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.settings import ProxySettings
from kvatlas.store.connection import Store
from kvatlas_router.proxy_service import run_proxy
from tests.chaos.child_process import ChildProcess
from tests.end_to_end.processes import ROOT
from tests.eventually import until
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, PATIENT_MS, running_fleet
from tests.router.proxy.faulty_engine import Answer, faulty_engine

ROUTERS = 3
ENGINES = 4
EVENTS = 4
LOOK_S = 0.1
"""Interval at which the balancer asks each router whether it is ready."""
DRAIN_S, PROCESS_DRAIN_S = 4, 5
"""For routers in this process, and for processes (the default): the balancer must have asked by then, even on a busy
machine."""
GRACE_S = 60

EVENT = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def slow_stream(gap_s: float) -> Answer:
    """Some events with a pause after each."""

    async def answer(_: Request) -> Response:
        async def events() -> AsyncIterator[bytes]:
            for _ in range(EVENTS):
                yield EVENT
                await asyncio.sleep(gap_s)
            yield DONE

        return StreamingResponse(events(), media_type="text/event-stream")

    return answer


class RouterLife(Protocol):
    """A router from its start to its end."""

    url: str

    async def stop(self) -> None:
        """Ask it to end, and wait until it has."""


StartRouter = Callable[[], Awaitable[RouterLife]]


@dataclass(slots=True)
class RouterTask:
    """A router in this process."""

    url: str
    scope: anyio.CancelScope
    ended: anyio.Event

    async def stop(self) -> None:
        self.scope.cancel()
        await self.ended.wait()

    @classmethod
    async def start(cls, redis_url: str, tasks: TaskGroup) -> RouterLife:
        given = {"port": 0, "wait": False, "tokenizer": "none", "learn": False, "access_log": False}
        settings = ProxySettings.load(
            redis_url=redis_url, decision_deadline_ms=PATIENT_MS, drain_s=DRAIN_S, grace_s=GRACE_S, **given
        )
        urls: list[str] = []
        scope, ended = anyio.CancelScope(), anyio.Event()

        async def live() -> None:
            with scope:
                await run_proxy(settings, urls.append)
            ended.set()

        tasks.start_soon(live)
        await until(lambda: urls, what="the new router listens")
        return cls(urls[0], scope, ended)


class RouterProcess:
    """A router as a process, ended by SIGTERM."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self.url = next(word for word in child.log_text().split() if word.startswith("http://")).rstrip(";")

    async def stop(self) -> None:
        await self._child.stop(GRACE_S + 30)

    @classmethod
    async def start(cls, redis_url: str, folder: Path, stack: AsyncExitStack, tree: Path = ROOT) -> RouterLife:
        flags = ["--redis-url", redis_url, "--port", "0", "--tokenizer", "none", "--no-access-log", "--no-learn"]
        flags += ["--drain-s", str(PROCESS_DRAIN_S), "--grace-s", str(GRACE_S)]
        child = ChildProcess(f"router-{secrets.token_hex(3)}", ["router", *flags], "router at", folder, tree)
        child.start()
        stack.callback(child.close)
        await child.ready()
        return cls(child)


@dataclass(slots=True)
class Member:
    """A router that the balancer knows. `stopping`: it was asked to end."""

    life: RouterLife
    stopping: bool = False
    ready: bool = True
    streams: int = 0


@dataclass(slots=True)
class Rolled:
    """`across`: streams that were running when their router was asked to stop. `first_s`: time to each stream's first byte, in
    calm and while a router was stopping."""

    complete: int = 0
    across: int = 0
    replaced: int = 0
    lost: list[str] = field(default_factory=list)
    first_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def added_s(self) -> float:
        """The longest time to the first byte while routers were replaced, minus the usual one."""
        return max(self.first_s[True]) - median(self.first_s[False])


class Balancer:
    """Round robin over the routers that report ready, like a Service."""

    def __init__(self, start: StartRouter) -> None:
        self._start = start
        self._turn = count()
        self.routers: list[Member] = []

    async def add(self) -> None:
        """Add a new router to the rotation once it is ready."""
        self.routers.append(Member(await self._start()))

    async def replace_oldest(self) -> int:
        """Start a router, stop the oldest one, and wait until it has ended. Returns the number of streams it had when it was
        asked to stop."""
        await self.add()
        oldest = self.routers[0]
        running = oldest.streams
        oldest.stopping = True
        await oldest.life.stop()
        self.routers.remove(oldest)
        return running

    def pick(self) -> Member:
        ready = [router for router in self.routers if router.ready]
        return ready[next(self._turn) % len(ready)]

    async def look(self) -> None:
        """Keep asking all routers whether they are ready, each at its own pace, because one may be slow."""
        asked: set[int] = set()
        async with http_client(timeout=5) as client, anyio.create_task_group() as tasks:
            while True:
                for router in self.routers:
                    if id(router) not in asked:
                        asked.add(id(router))
                        tasks.start_soon(self._look_at, router, client)
                await asyncio.sleep(LOOK_S)

    async def _look_at(self, router: Member, client: httpx.AsyncClient) -> None:
        while router in self.routers:
            try:
                router.ready = (await client.get(f"{router.life.url}/ready")).status_code == 200
            except httpx.TimeoutException:
                pass  # keep the previous state: one late answer means little
            except httpx.HTTPError:
                router.ready = False
            await asyncio.sleep(LOOK_S)


async def roll(store: Store, start: StartRouter, *, streams: int, gap_s: float) -> Rolled:
    """Replace each of ROUTERS routers while this many streams run, each of EVENTS events with a pause of `gap_s`."""
    rolled = Rolled()
    over = False

    async def read(balancer: Balancer, client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(gap_s * EVENTS * number / streams)  # they don't all begin at once
        while not over:
            router = balancer.pick()
            router.streams += 1
            body = {"model": MODEL, "prompt": [number, *range(40)], "stream": True}
            began, text = monotonic(), b""
            try:
                async with client.stream("POST", f"{router.life.url}/v1/completions", json=body) as answer:
                    async for part in answer.aiter_raw():
                        if not text:
                            stopping = any(one.stopping for one in balancer.routers)
                            rolled.first_s[stopping].append(monotonic() - began)
                        text += part
            except httpx.HTTPError as error:
                rolled.lost.append(f"{type(error).__name__}: {error}")
                continue
            finally:
                router.streams -= 1
            if text == EVENT * EVENTS + DONE:
                rolled.complete += 1
            else:
                rolled.lost.append(text.decode()[-200:])

    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        for number in range(ENGINES):
            engine = await stack.enter_async_context(faulty_engine(slow_stream(gap_s)))
            await fleet.report(f"w{number}", engine.url)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        client = await stack.enter_async_context(http_client(timeout=30, limits=limits))
        balancer = Balancer(start)
        for _ in range(ROUTERS):
            await balancer.add()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(balancer.look)
            async with anyio.create_task_group() as readers:
                for number in range(streams):
                    readers.start_soon(read, balancer, client, number)
                await until(lambda: rolled.complete >= streams // 2 or rolled.lost, deadline_s=60, what="streams run")
                for _ in range(ROUTERS):
                    rolled.across += await balancer.replace_oldest()
                    rolled.replaced += 1
                over = True
            tasks.cancel_scope.cancel()
        for router in balancer.routers:
            await router.life.stop()
    return rolled
