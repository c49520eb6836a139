"""Real processes under load through `kvatlas router`: no request is lost when processes behind it are killed."""

import json
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import anyio
import httpx
import pytest
from anyio.to_thread import run_sync

from kvatlas.errors import Unreachable
from kvatlas.fleet_store.fleet_store import FleetStore
from tests.chaos.child_process import ChildProcess
from tests.chaos.fleet import MODEL, PARTITIONS, Fleet, running_fleet
from tests.chaos.proxy import LOOPBACK
from tests.eventually import until
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

CLIENTS = 6
OUTAGES = ((5.0, True), (1.0, False))
"""(seconds that the store is away, whether it keeps its data)"""


@dataclass(slots=True)
class Clients:
    """Several clients, each sending one request after another, every second one streamed."""

    url: str
    answered: int = 0
    by_index: int = 0
    lost: list[str] = field(default_factory=list)
    broken: int = 0
    """Streams that ended with an error event."""

    async def run(self) -> None:
        """Send requests until cancelled."""
        async with (
            http_client(base_url=self.url, timeout=20) as client,
            anyio.create_task_group() as tasks,
        ):
            for number in range(CLIENTS):
                tasks.start_soon(self._send_requests, client, number)

    async def wait_for_answers(self, answers: int) -> None:
        """Wait until this many more requests are answered."""
        goal = self.answered + answers
        await until(lambda: self.answered >= goal or self.lost, what=f"{answers} more answers")

    async def _send_requests(self, client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        streamed = False
        while True:
            head = [rng.randrange(4)] * 64
            body = {"model": MODEL, "prompt": head + [rng.randrange(50_000) for _ in range(64)], "max_tokens": 4}
            streamed = not streamed
            try:
                answer = await client.post("/v1/completions", json={**body, "stream": streamed})
            except httpx.HTTPError as error:
                self.lost.append(f"{type(error).__name__}: {error}")
                continue
            self._record(answer, streamed)
            await anyio.sleep(0.01)

    def _record(self, answer: httpx.Response, streamed: bool) -> None:
        complete = answer.text.rstrip().endswith("data: [DONE]") if streamed else "usage" in answer.text
        if answer.status_code == 200 and complete:
            self.answered += 1
            self.by_index += "by=cost" in answer.headers["x-kvatlas-decision"]
        elif streamed and answer.status_code == 200 and "mid-answer" in _last_event(answer.text):
            self.broken += 1
        else:
            self.lost.append(f"{answer.status_code}: {answer.text[-200:]}")


def _last_event(text: str) -> str:
    last = text.rstrip().rpartition("\n\n")[2].removeprefix("data: ")
    return str((json.loads(last).get("error") or {}).get("message", "")) if last.startswith("{") else ""


@asynccontextmanager
async def router(fleet: Fleet) -> AsyncIterator[Clients]:
    """A router process in front of the fleet, and running clients."""
    servers = ["--redis-url", fleet.valkey.url, "--nats-url", fleet.nats_server.url]
    child = ChildProcess(
        "router",
        ["router", *servers, "--port", "0", "--tokenizer", "none", "--continue-answers", "all"],
        "router at",
        fleet.folder,
    )
    child.start()
    try:
        await child.ready()
        url = next(word for word in child.log_text().split() if word.startswith(f"http://{LOOPBACK}")).rstrip(";")
        clients = Clients(url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(clients.run)
            yield clients
            tasks.cancel_scope.cancel()
    finally:
        child.close()


async def test_no_request_is_lost(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, engines=3, indexers=2, seed=1) as fleet:

        async def are_routable() -> bool:
            try:
                records = (await FleetStore(fleet.store).all()).values()
            except Unreachable:  # a connection from before the store was away
                return False
            return sum(record.routable for record in records) == len(fleet.workers)

        await until(are_routable, what="every worker is routable")
        async with router(fleet) as clients:
            await clients.wait_for_answers(20)

            killed = fleet.indexers[0].child
            killed.kill()

            async def are_taken_over() -> bool:
                leases = await FleetStore(fleet.store).leases()
                return len(leases) == PARTITIONS and killed.name not in leases.values()

            await until(are_taken_over, what="the killed indexer's partitions are taken over")
            await clients.wait_for_answers(20)
            assert (clients.lost, clients.broken) == ([], 0), "an indexer was killed"

            for away_s, with_data in OUTAGES:
                await _store_away(fleet, clients, away_s, with_data)
                assert (clients.lost, clients.broken) == ([], 0), f"the store was away for {away_s:g} s"

            await until(are_routable, what="every worker is routable again")
            fleet.workers[0].engine.kill()
            await clients.wait_for_answers(60)
            assert (clients.lost, clients.broken) == ([], 0), "an engine was killed"


async def _store_away(fleet: Fleet, clients: Clients, away_s: float, with_data: bool) -> None:
    """Requests are answered without the store, and with the index soon after the store is back."""
    before, began = clients.answered, monotonic()
    await fleet.valkey.kill()
    await until(lambda: monotonic() - began >= away_s, deadline_s=2 * away_s, what="the store was away")
    assert clients.answered - before > CLIENTS
    if not with_data:
        await run_sync(shutil.rmtree, fleet.valkey.process.data_dir / "appendonlydir")
    await fleet.valkey.start()
    by_index = clients.by_index
    await until(lambda: clients.by_index > by_index, what="the index decides again")
    await clients.wait_for_answers(20)
