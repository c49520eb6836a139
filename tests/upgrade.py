"""A rolling upgrade and rollback of each part, under load: `python -m tests.upgrade REV` (a commit of this repository, for
example HEAD~1).

Everything starts in version REV: two routers behind a balancer that follows `/ready`, two indexers, and a sidecar for each of
three engines. Then routers, indexers and sidecars are replaced, one process at a time, by those of this tree, by those of REV
again, and finally by those of this tree; and once more in the opposite order. Clients keep sending requests through the
routers; none may be lost. After every step the index must be exact, read by both versions' `kvatlas export` as long as the
older one knows the store's layout. Exit code 0 if it always was.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import anyio
import httpx

from tests.chaos.child_process import ChildProcess
from tests.chaos.exactness import residences_of_export
from tests.chaos.fleet import MODEL, RETIRE_AFTER_S, Fleet, running_fleet
from tests.chaos.requests.rolled_routers import Balancer, RouterLife, RouterProcess
from tests.chaos.scenario_run import ScenarioRun
from tests.end_to_end.processes import ROOT, check_out, environment
from tests.eventually import until
from tests.http_client import http_client

ENGINES = 3
HYBRIDS = 1
INDEXERS = 2
ROUTERS = 2
CLIENTS = 4
PARTS = ("routers", "indexers", "sidecars")
"""The parts, in the order in which they are to be upgraded."""


@dataclass(slots=True)
class Clients:
    """Clients that send requests through the balancer, each one after another, while `run` runs and they are not paused."""

    balancer: Balancer
    answered: int = 0
    lost: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    _open: int = 0
    _running: anyio.Event = field(default_factory=anyio.Event)

    async def run(self) -> None:
        """Send requests until cancelled."""
        limits = httpx.Limits(max_keepalive_connections=0)
        async with (
            http_client(timeout=30, limits=limits) as client,
            anyio.create_task_group() as tasks,
        ):
            for number in range(CLIENTS):
                tasks.start_soon(self._send_requests, client, random.Random(number))

    def resume(self) -> None:
        self._running.set()

    async def pause(self) -> None:
        """Send no more requests, and wait until none is open."""
        self._running = anyio.Event()
        await until(lambda: not self._open, what="no request is open")

    async def _send_requests(self, client: httpx.AsyncClient, rng: random.Random) -> None:
        while True:
            await self._running.wait()
            head = [rng.randrange(4)] * 64
            body = {"model": MODEL, "prompt": head + [rng.randrange(50_000) for _ in range(64)], "max_tokens": 4}
            router, began_s = self.balancer.pick(), monotonic()
            router.streams += 1
            self._open += 1
            try:
                answer = await client.post(f"{router.life.url}/v1/completions", json=body)
                if answer.status_code != 200 or "usage" not in answer.text:
                    self.lost.append(f"{answer.status_code}: {answer.text[-200:]}")
            except httpx.HTTPError as error:
                self.lost.append(f"{type(error).__name__}: {error}")
            finally:
                router.streams -= 1
                self._open -= 1
            self.answered += 1
            self.longest_s = max(self.longest_s, monotonic() - began_s)
            await anyio.sleep(0.02)


class Upgrade:
    """A running fleet, its routers, and the running versions."""

    def __init__(self, fleet: Fleet, balancer: Balancer, clients: Clients, old: Path) -> None:
        self._fleet = fleet
        self._balancer = balancer
        self._clients = clients
        self._old = old
        self.router_tree = old

    async def replace(self, part: str, tree: Path) -> None:
        """Replace every process of a part, one at a time, by this version's."""
        if part == "routers":
            self.router_tree = tree
            for _ in range(ROUTERS):
                await self._balancer.replace_oldest()
            return
        children = [worker.sidecar for worker in self._fleet.workers]
        if part == "indexers":
            children = [indexer.child for indexer in self._fleet.indexers]
        for child in children:
            await restart(child, tree)

    async def check(self, what: str) -> None:
        """Check the fleet. Raises AssertionError if a request was lost, or the index is not exact."""
        run, answered = ScenarioRun(self._fleet, what), self._clients.answered
        await run.begin()
        self._clients.resume()
        await run.wait_for_answers(10)
        goal = answered + 30
        await until(lambda: self._clients.answered >= goal, deadline_s=60, what="30 more answers of the routers")
        await self._clients.pause()
        outcome = await run.settle()
        assert not self._clients.lost, f"{what}: {len(self._clients.lost)} requests lost: {self._clients.lost[0]}"
        lines = await exported(self._old, self._fleet.store_url)
        older = "older version can't read this layout"
        if lines is not None:
            assert residences_of_export(lines) == await self._fleet.export(), (
                f"{what}: the versions read different blocks"
            )
            older = "both versions read the same"
        print(
            f"{what}: {outcome.residencies} residencies exact, {older}; "
            f"{self._clients.answered} requests, 0 lost, longest {self._clients.longest_s:.1f} s",
            flush=True,
        )
        self._clients.resume()
        self._fleet.load.resume()


async def restart(child: ChildProcess, tree: Path) -> None:
    await child.stop()
    child.tree = tree
    child.start()
    await child.ready()


async def exported(tree: Path, redis_url: str) -> Sequence[str] | None:
    """The output of `kvatlas export` of the version in this folder; None if it does not know the store's layout."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvatlas_cli.main", "export", "--redis-url", redis_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environment(), "PYTHONPATH": str(tree)},
        cwd=tree,
    )
    out, err = await process.communicate()
    if process.returncode == 1 and b"layout version" in err:
        return None
    assert process.returncode == 0, f"export of {tree} failed: {err.decode()}"
    return out.decode().splitlines()


@asynccontextmanager
async def upgrade_from(old: Path, folder: Path) -> AsyncIterator[Upgrade]:
    """A fleet in the older version, under load."""
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            running_fleet(
                folder,
                engines=ENGINES,
                hybrids=HYBRIDS,
                indexers=INDEXERS,
                seed=1,
                indexer_arguments=("--retire-after-s", str(RETIRE_AFTER_S)),  # both versions know these
                tree=old,
            )
        )

        async def start_router() -> RouterLife:
            return await RouterProcess.start(fleet.store_url, folder, stack, upgrade.router_tree)

        balancer = Balancer(start_router)
        upgrade = Upgrade(fleet, balancer, clients := Clients(balancer), old)
        for _ in range(ROUTERS):
            await balancer.add()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(balancer.look)
            tasks.start_soon(clients.run)
            yield upgrade
            await clients.pause()
            tasks.cancel_scope.cancel()


async def run(revision: str, folder: Path) -> None:
    """Raises AssertionError."""
    old = await check_out(revision, folder / "old")
    async with upgrade_from(old, folder) as upgrade:
        await upgrade.check("all parts older")
        for part in PARTS:
            for tree, name in ((ROOT, "newer"), (old, "older again"), (ROOT, "newer again")):
                await upgrade.replace(part, tree)
                await upgrade.check(f"{part} {name}")
        for part in reversed(PARTS):
            await upgrade.replace(part, old)
            await upgrade.check(f"{part} rolled back")
        for part in reversed(PARTS):
            await upgrade.replace(part, ROOT)
            await upgrade.check(f"{part} newer, in the opposite order")


def main() -> None:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="kvatlas-upgrade-") as folder:
        try:
            anyio.run(partial(run, sys.argv[1], Path(folder)))
        except* (AssertionError, TimeoutError) as errors:
            error: BaseException = errors
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            print(f"NOT EXACT: {error}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
