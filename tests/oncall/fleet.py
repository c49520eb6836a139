"""A small, separate fleet of processes for each fault."""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx

from kvatlas.embedded.async_servers import EmbeddedServer
from kvatlas.embedded.free_port import LOOPBACK, free_port
from tests.alerts.__main__ import is_busy
from tests.chaos.child_process import ChildProcess
from tests.chaos.proxy import TcpProxy
from tests.end_to_end.processes import environment
from tests.http_client import http_client

MODEL = "m"
REQUESTS_PER_S = 8
OF_A_SLOW_MACHINE = frozenset({"routers.answers", "store.distance", "store.reachable"})
"""The doctor's findings about times: late events, a store that answers late, or too late for the whole examination."""
PATIENT_MS = 2_000
"""How long a decision waits for the store: a shared machine answers late."""


@dataclass(frozen=True, slots=True)
class Said:
    """The doctor's output. `findings`: its lines by check, without those that are neither warnings nor errors."""

    answer: str
    findings: Mapping[str, Sequence[str]]

    @property
    def blamed(self) -> set[str]:
        """The checks that find something, except what a busy machine may cause now."""
        return self.findings.keys() - (OF_A_SLOW_MACHINE if is_busy() else frozenset())

    @property
    def green(self) -> bool:
        return not self.blamed and "? Yes" in self.answer


@dataclass(slots=True)
class Fleet:
    """Two engines with sidecars, an indexer and a router. `near`: the line to the store, which a fault makes longer."""

    folder: Path
    nats: EmbeddedServer
    store: EmbeddedServer
    near: TcpProxy
    engines: list[ChildProcess] = field(default_factory=list)
    sidecars: list[ChildProcess] = field(default_factory=list)
    engine_ports: list[Sequence[int]] = field(default_factory=list)
    parts: dict[str, ChildProcess] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    router_url: str = ""
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Number of requests that got no answer, by what they got instead."""

    @property
    def failed(self) -> int:
        return self.failures.total()

    @property
    def redis_url(self) -> str:
        return f"redis://{LOOPBACK}:{self.near.port}"

    async def ask_doctor(self, *flags: str) -> Said:
        """Run the doctor."""
        words = ["doctor", "--json", "--nats-url", self.nats.url, "--redis-url", self.redis_url, *flags]
        command = [sys.executable, "-m", "kvatlas_cli.main", *words]
        done = await anyio.run_process(command, check=False, env=environment())
        found: list[dict[str, str]] = json.loads(done.stdout)
        answers = [one["line"] for one in found if one["check"] == "serving"]
        findings: dict[str, list[str]] = {}
        for one in found:
            if one["level"] in ("error", "warning") and one["check"] != "serving":
                findings.setdefault(one["check"], []).append(f"{one['line']} -> {one['advice']}")
        return Said(" | ".join(answers), findings)

    async def replace(self, part: str, ready: str, **variables: str) -> None:
        """Restart a part with different environment variables."""
        old = self.parts[part]
        await old.stop()
        self.parts[part] = child(self, part, ready, *old.arguments, **{**old.variables, **variables})
        self.parts[part].start()
        await self.parts[part].ready()

    async def page(self, part: str) -> dict[str, Any]:
        """A part's /status; empty if it does not answer."""
        port = self.router_url if part == "router" else f"http://{LOOPBACK}:{self.ports[0]}"
        try:
            async with http_client(timeout=3) as client:
                found: dict[str, Any] = (await client.get(f"{port}/status")).json()
                return found
        except httpx.HTTPError:
            return {}

    def close(self) -> None:
        """End every part."""
        for part in (*self.engines, *self.sidecars, *self.parts.values()):
            part.close()

    def log(self) -> str:
        """The logs of all parts since their last start."""
        every = [*self.parts.values(), *self.sidecars, *self.engines]
        return "\n".join(one.log_text() for one in every if one.log.exists())

    async def send_requests(self) -> None:
        """Send prompts of a few conversations, until cancelled."""
        number = 0
        async with http_client(base_url=self.router_url, timeout=8) as client:

            async def ask(number: int) -> None:
                prompt = f"Conversation {number % 5}. " + "And so on and so on. " * 20 + f"This is number {number}."
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
                try:
                    answer = await client.post("/v1/completions", json=body)
                except httpx.HTTPError as error:
                    self.failures[repr(error)] += 1
                    return
                if answer.status_code == 200:
                    self.answered += 1
                else:
                    self.failures[f"{answer.status_code} {answer.text[:200]}"] += 1

            async with anyio.create_task_group() as group:
                while True:
                    number += 1
                    group.start_soon(ask, number)
                    await anyio.sleep(1 / REQUESTS_PER_S)  # a paced load


def child(fleet: Fleet, name: str, ready: str, *arguments: str, **variables: str) -> ChildProcess:
    """A part that the fault may start; it is not started here."""
    return ChildProcess(name, arguments, ready, fleet.folder, variables=variables)


def sidecar(
    fleet: Fleet, name: str, worker_id: str, engine: Sequence[int], *more: str, model_id: str = MODEL
) -> ChildProcess:
    """`engine`: its ports for HTTP, events and replay. `more`: flags."""
    http, events, replay = (f"{LOOPBACK}:{port}" for port in engine)
    flags = [
        "--engine",
        "vllm",
        "--worker-id",
        worker_id,
        "--model-id",
        model_id,
        "--nats-url",
        fleet.nats.url,
        *more,
    ]
    flags += ["--endpoint", f"tcp://{events}", "--replay-endpoint", f"tcp://{replay}", "--engine-url", f"http://{http}"]
    return child(fleet, name, "is published", "publish", *flags)


def engine(fleet: Fleet, name: str, ports: Sequence[int]) -> ChildProcess:
    http, events, replay = ports
    flags = ["--endpoint", f"tcp://{LOOPBACK}:{events}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay}"]
    flags += ["--model", MODEL, "--port", str(http), "--speed-up", "100"]
    return child(fleet, name, "engine at", "simulate-engine", *flags)


@asynccontextmanager
async def running_fleet(
    folder: Path, nats: EmbeddedServer, store: EmbeddedServer, deadline_ms: int = PATIENT_MS
) -> AsyncIterator[Fleet]:
    """A started fleet whose parts are ready. `deadline_ms`: the deadline of the router's decisions."""
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(TcpProxy(int(store.url.rpartition(":")[2].split("/")[0]), "store"))
        fleet = Fleet(folder, nats, store, near)
        for number in range(2):
            ports = [free_port(), free_port(), free_port()]
            fleet.engines.append(engine(fleet, f"engine-{number}", ports))
            fleet.engine_ports.append(ports)
            fleet.sidecars.append(sidecar(fleet, f"sidecar-{number}", f"w{number}", ports))
        status, http = free_port(), free_port()
        fleet.ports += [status, http]
        flags = ["--nats-url", nats.url, "--redis-url", fleet.redis_url, "--stream-storage", "memory"]
        fleet.parts["indexer"] = child(fleet, "indexer", "is ready", "indexer", *flags, "--status-port", str(status))
        routing = ["--redis-url", fleet.redis_url, "--port", str(http), "--drain-s", "0", "--no-access-log"]
        deadline = {"KVATLAS_DECISION_DEADLINE_MS": str(deadline_ms)}
        fleet.parts["router"] = child(fleet, "router", "router at", "router", *routing, **deadline)
        fleet.router_url = f"http://{LOOPBACK}:{http}"
        every = [*fleet.engines, *fleet.sidecars, *fleet.parts.values()]
        stack.callback(fleet.close)
        for part in every:
            part.start()
        for part in every:
            await part.ready()
        yield fleet
