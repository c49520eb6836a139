"""`python -m tests.alerts`: alerts on running processes, whose time runs faster in the rules. Takes some five minutes.

A fleet serves requests while a real Prometheus scrapes it. In a healthy hour no alert fires; then each cause is made in
turn, its alerts must fire, and end when the cause does. Needs Debian's `prometheus`. Exit code 0 if all went so.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import anyio
import httpx
import nats
import zmq
import zmq.asyncio
from redis.asyncio import Redis

from kvatlas.bus.subjects import events_subject
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.embedded.async_servers import EmbeddedServer
from kvatlas.embedded.free_port import LOOPBACK, free_port
from tests.chaos.child_process import ChildProcess
from tests.deployment.test_alerts import ALERTS, FILE
from tests.end_to_end.prometheus import Prometheus
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher

SPEED = 30
"""A minute of the rules takes 2 s here."""
HEALTHY_S = 3_600 / SPEED
FIRES_S = 90.0
ENDS_S = 120.0
REQUESTS_PER_S = 8
OF_A_SLOW_MACHINE = {
    "KvatlasDecisionsSlow",
    "KvatlasDecisionsWithoutIndex",
    "KvatlasIndexLate",
    "KvatlasPredictionsWrong",
    "KvatlasTokenIdsMissing",
}
"""They are about times, which say nothing on a shared machine."""
_UNITS = {"s": 1, "m": 60, "h": 3_600}


def faster_rules(folder: Path) -> Path:
    """The rules with every duration divided by SPEED, and at least the four scrapes that a rate needs."""

    def shorten(found: re.Match[str]) -> str:
        seconds = int(found[2]) * _UNITS[found[3]] / SPEED
        return f"{found[1]}{max(4 if found[1] == '[' else 1, round(seconds))}s"

    text = re.sub(r"(\[)(\d+)([smh])(?=\])", shorten, FILE.read_text())
    rules = folder / "rules.yaml"
    rules.write_text(re.sub(r"(for: )(\d+)([smh])\b", shorten, text))
    return rules


@dataclass(slots=True)
class Fleet:
    """All parts, by what they are."""

    nats: EmbeddedServer
    valkey: EmbeddedServer
    engines: list[ChildProcess]
    sidecars: list[ChildProcess]
    indexer: ChildProcess
    router: ChildProcess
    wrong_sidecar: ChildProcess
    event_socket: zmq.asyncio.Socket
    event_url: str
    router_url: str
    ports: list[int]


@asynccontextmanager
async def running_fleet(folder: Path) -> AsyncIterator[Fleet]:
    """Two engines with sidecars, an indexer, a router; and a sidecar, not started, that listens to the socket of something
    else."""
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(nats_server())
        store = await stack.enter_async_context(valkey_server())
        servers = ["--nats-url", bus.url, "--redis-url", store.url]
        ports: list[int] = []

        def child(name: str, ready: str, *arguments: str) -> ChildProcess:
            made = ChildProcess(name, arguments, ready, folder)
            stack.callback(made.close)
            return made

        def status_port() -> list[str]:
            ports.append(free_port())
            return ["--status-port", str(ports[-1])]

        def sidecar(worker_id: str, http: int, events: int, replay: int) -> ChildProcess:
            sockets = ["--endpoint", f"tcp://{LOOPBACK}:{events}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay}"]
            flags = ["--engine", "vllm", "--worker-id", worker_id, "--model-id", "m", *sockets, *servers]
            url = ["--engine-url", f"http://{LOOPBACK}:{http}", *status_port()]
            return child(f"sidecar-{worker_id}", "is published", "publish", *flags, *url)

        engines, sidecars = [], []
        for number in range(2):
            http, events, replay = free_port(), free_port(), free_port()
            flags = ["--endpoint", f"tcp://{LOOPBACK}:{events}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay}"]
            flags += ["--model", "m", "--port", str(http), "--speed-up", "100"]
            engines.append(child(f"engine-{number}", "engine at", "simulate-engine", *flags))
            sidecars.append(sidecar(f"w{number}", http, events, replay))
        wrong_port = free_port()
        wrong = sidecar("wrong", http, wrong_port, free_port())
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, 0)
        socket = context.socket(zmq.PUB)
        indexer = child("indexer", "is ready", "indexer", *servers, "--stream-storage", "memory", *status_port())
        router_port = free_port()
        ports.append(router_port)
        flags = ["--port", str(router_port), "--decision-deadline-ms", "2000", "--no-access-log", "--drain-s", "0"]
        router = child("router", "router at", "router", "--redis-url", store.url, *flags)
        parts = [indexer, *engines, *sidecars, router]
        for part in parts:
            part.start()
        for part in parts:
            await part.ready()
        url = f"http://{LOOPBACK}:{router_port}"
        socket_url = f"tcp://{LOOPBACK}:{wrong_port}"
        yield Fleet(bus, store, engines, sidecars, indexer, router, wrong, socket, socket_url, url, ports)


async def send_requests(fleet: Fleet) -> None:
    """Requests of a few prompts that grow, until cancelled. What becomes of them is for the alerts to say."""
    number = 0
    async with httpx.AsyncClient(base_url=fleet.router_url, trust_env=False, timeout=10) as client:

        async def ask(number: int) -> None:
            prompt = f"Conversation {number % 7}. " + "And so on and so on. " * (20 + number % 50)
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "stream": number % 2 == 0}
            try:
                await client.post("/v1/completions", json=body)
            except httpx.HTTPError:
                return

        async with anyio.create_task_group() as group:
            while True:
                number += 1
                group.start_soon(ask, number)
                await anyio.sleep(1 / REQUESTS_PER_S)  # a paced load


@asynccontextmanager
async def no_indexer(fleet: Fleet) -> AsyncIterator[None]:
    await fleet.indexer.stop()
    yield
    fleet.indexer.start()
    await fleet.indexer.ready()


@asynccontextmanager
async def store_hangs(fleet: Fleet) -> AsyncIterator[None]:
    fleet.valkey.pause()
    yield
    fleet.valkey.resume()


@asynccontextmanager
async def store_is_nearly_full(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        used = int((await store.info("memory"))["used_memory"])
        await store.config_set("maxmemory", int(used * 1.08))
        yield
        await store.config_set("maxmemory", 0)


@asynccontextmanager
async def store_is_full(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        await store.config_set("maxmemory", 1_000_000)
        yield
        await store.config_set("maxmemory", 0)


@asynccontextmanager
async def store_evicts(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        await store.config_set("maxmemory-policy", "allkeys-lru")
        yield
        await store.config_set("maxmemory-policy", "noeviction")


@asynccontextmanager
async def bus_hangs(fleet: Fleet) -> AsyncIterator[None]:
    fleet.nats.pause()
    yield
    fleet.nats.resume()


@asynccontextmanager
async def worker_in_doubt(fleet: Fleet) -> AsyncIterator[None]:
    """It tells of messages that the index never had, and answers no request."""
    client = await nats.connect(fleet.nats.url)
    ghost = BusPublisher(client, "ghost", incarnation=7)

    async def beat() -> None:
        while True:
            await ghost.beat(acked_seq=5)
            await anyio.sleep(0.5)  # its pace

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        yield
        group.cancel_scope.cancel()
    await client.close()


@asynccontextmanager
async def sidecar_hangs(fleet: Fleet) -> AsyncIterator[None]:
    fleet.sidecars[0].pause()
    yield
    fleet.sidecars[0].resume()


@asynccontextmanager
async def messages_of_something_else(fleet: Fleet) -> AsyncIterator[None]:
    client = await nats.connect(fleet.nats.url)
    await client.jetstream().publish(events_subject("stranger", 64), b"no message of ours")
    yield
    await client.close()


@asynccontextmanager
async def wrong_event_port(fleet: Fleet) -> AsyncIterator[None]:
    fleet.wrong_sidecar.start()
    await fleet.wrong_sidecar.ready()
    yield
    await fleet.wrong_sidecar.stop()


@asynccontextmanager
async def events_of_something_else(fleet: Fleet) -> AsyncIterator[None]:
    fleet.event_socket.bind(fleet.event_url)
    fleet.wrong_sidecar.start()
    await fleet.wrong_sidecar.ready()

    async def send() -> None:
        number = 0
        while True:
            await fleet.event_socket.send_multipart([b"", number.to_bytes(8, "big"), b"no batch of events"])
            number += 1
            await anyio.sleep(0.2)  # a paced feed

    async with anyio.create_task_group() as group:
        group.start_soon(send)
        yield
        group.cancel_scope.cancel()
    fleet.event_socket.unbind(fleet.event_url)
    await fleet.wrong_sidecar.stop()


@asynccontextmanager
async def engines_hang(fleet: Fleet) -> AsyncIterator[None]:
    for engine in fleet.engines:
        engine.kill()
    yield
    for engine in fleet.engines:
        engine.start()
    for engine in fleet.engines:
        await engine.ready()


CAUSES = {
    no_indexer: {"KvatlasNoIndexer"},
    store_hangs: {"KvatlasStoreFails", "KvatlasPartitionsWithoutOwner"},
    store_is_nearly_full: {"KvatlasStoreNearlyFull"},
    store_is_full: {"KvatlasStoreOutOfMemory"},
    store_evicts: {"KvatlasStoreEvicts"},
    bus_hangs: {"KvatlasPublishingBlocked"},
    worker_in_doubt: {"KvatlasWorkersInDoubt"},
    sidecar_hangs: {"KvatlasWorkersLost"},
    messages_of_something_else: {"KvatlasMessagesRefused"},
    wrong_event_port: {"KvatlasFeedDisconnected"},
    events_of_something_else: {"KvatlasUndecodableEvents"},
    engines_hang: {"KvatlasRequestsFail"},
}
"""What is done, and the alerts that fire by it; others may as well."""


class Watch:
    """The alerts that fire, but for those OF_A_SLOW_MACHINE."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, trust_env=False)

    async def firing(self) -> set[str]:
        answer = await self._client.get("/api/v1/alerts")
        alerts = answer.json()["data"]["alerts"]
        return {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"} - OF_A_SLOW_MACHINE

    async def counts(self, query: str) -> bool:
        """Has the query a result?"""
        answer = await self._client.get("/api/v1/query", params={"query": query})
        return bool(answer.json()["data"]["result"])


async def healthy_hour(watch: Watch) -> set[str]:
    """What fired in it. It begins when all parts were scraped and every partition has its owner: a start takes seconds, which
    are minutes of the faster rules."""
    seen: set[str] = set()

    async def is_healthy() -> bool:
        return await watch.counts("sum(kvatlas_indexer_partitions_owned) == 64") and not await watch.firing()

    await until(is_healthy, deadline_s=ENDS_S, what="every partition has its owner, and no alert fires")
    until_s = monotonic() + HEALTHY_S
    while monotonic() < until_s:
        seen |= await watch.firing()
        await anyio.sleep(1)  # as often as Prometheus evaluates the rules
    return seen


async def check() -> list[str]:
    """What went otherwise than it should, a line each."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvatlas-alerts-") as name:
        folder = Path(name)
        async with running_fleet(folder) as fleet, anyio.create_task_group() as group:
            group.start_soon(send_requests, fleet)
            with Prometheus(fleet.ports, folder, faster_rules(folder)) as prometheus:
                watch = Watch(prometheus.url)
                seen = await healthy_hour(watch)
                print(f"a healthy hour in {HEALTHY_S:g} s: {', '.join(sorted(seen)) or 'no alert'}", flush=True)
                wrong += [f"{one} fired in a healthy hour" for one in sorted(seen)]
                for cause, alerts in CAUSES.items():
                    wrong += await provoke(cause.__name__.replace("_", " "), cause(fleet), alerts, watch)
            group.cancel_scope.cancel()
    return wrong


async def provoke(name: str, cause: AbstractAsyncContextManager[None], alerts: set[str], watch: Watch) -> list[str]:
    """Make the cause, and wait until its alerts fire, and until they don't any more."""
    began = monotonic()
    wrong: list[str] = []
    async with cause:
        missing = set(alerts)
        while missing and monotonic() < began + FIRES_S:
            missing -= await watch.firing()
            await anyio.sleep(0.5)
        fired_s = monotonic() - began
    wrong += [f"{name}: {alert} did not fire in {FIRES_S:g} s" for alert in sorted(missing)]
    ended = monotonic()
    while (left := alerts & await watch.firing()) and monotonic() < ended + ENDS_S:
        await anyio.sleep(0.5)
    wrong += [f"{name}: {alert} still fires {ENDS_S:g} s after its cause" for alert in sorted(left)]
    verdict = "WRONG" if missing or left else f"after {fired_s:.0f} s, over {monotonic() - ended:.0f} s later"
    print(f"{name}: {', '.join(sorted(alerts))}: {verdict}", flush=True)
    return wrong


def main() -> None:
    if shutil.which("prometheus") is None:
        sys.exit("prometheus is missing: apt-get install prometheus")
    provoked = set().union(*CAUSES.values())
    assert provoked <= ALERTS.keys()
    wrong = anyio.run(check)
    print(
        f"{len(provoked)} of {len(ALERTS)} alerts provoked on running processes; promtool fires the others by their metrics"
    )
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
