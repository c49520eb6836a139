"""A whole fleet of real processes, with a proxy in every line that can break."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
from nats.aio.client import Client
from redis.exceptions import RedisError

from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store, open_store
from tests.chaos.child import Child
from tests.chaos.exactness import Checker, Residence, of_export
from tests.chaos.load import BLOCK, Load
from tests.chaos.proxy import LOOPBACK, TcpProxy
from tests.end_to_end.processes import query
from tests.eventually import until

MODEL = "chaos-model"
ADAPTER = "chaos-adapter"
PARTITIONS = 16
SHARDS = 4
OUTBOX_BYTES = 24 * 1024
GPU_BLOCKS = 500
CPU_BLOCKS = 120
LARGE_BLOCKS = 12_000
"""Of a large engine: its snapshots need a grant."""
NATS_PENDING_BYTES = 8 << 20
"""What the server keeps for a connection that is slow to read; by default 64 MiB."""
RETIRE_AFTER_S = 8
"""The indexers' patience in scenarios, instead of a minute, so that none need wait for one."""


@dataclass(slots=True)
class Worker:
    """One engine and its sidecar."""

    worker_id: str
    url: str
    engine: Child
    sidecar: Child
    events: TcpProxy
    replay: TcpProxy
    nats: TcpProxy
    state_dir: Path
    sidecar_words: Sequence[str]

    @property
    def state_file(self) -> Path:
        return self.state_dir / f"{self.worker_id}.state"

    def second_sidecar(self) -> Child:
        """Another publisher of the same worker, with no saved state; not started."""
        return Child(f"{self.worker_id}-second", self.sidecar_words, "is published", self.state_dir.parent)


@dataclass(slots=True)
class Member:
    """One replica of the indexer."""

    child: Child
    nats: TcpProxy
    redis: TcpProxy


@dataclass(slots=True)
class Fleet:
    """Everything that runs. `nats` and `store` go past the proxies."""

    folder: Path
    nats_server: EmbeddedServer
    valkey: EmbeddedServer
    nats: Client
    store: Store
    workers: list[Worker]
    members: list[Member]
    load: Load
    checker: Checker
    stack: AsyncExitStack
    indexers: int
    """replicas at the start"""
    large: int = 0
    """so many of the workers, the first ones, have a large cache"""
    indexer_words: list[str] = field(default_factory=list)

    async def fill_large(self) -> None:
        """The large engines' caches are nearly full afterwards."""
        for worker in self.workers[: self.large]:
            await self.load.fill(worker.worker_id, LARGE_BLOCKS * 9 // 10)

    async def export(self) -> dict[str, set[Residence]]:
        """What `kvatlas export` prints, by worker."""
        return of_export((await query("export", "--redis-url", self.valkey.url)).splitlines())

    async def add_member(self) -> Member:
        """One more replica, not started."""
        name = f"indexer-{len(self.members)}"
        nats = await self.stack.enter_async_context(TcpProxy(self.nats_server.port, f"{name} to NATS"))
        redis = await self.stack.enter_async_context(TcpProxy(self.valkey.port, f"{name} to Redis"))
        words = [
            "indexer",
            "--nats-url",
            f"nats://{LOOPBACK}:{nats.port}",
            "--redis-url",
            f"redis://{LOOPBACK}:{redis.port}",
        ]
        words += ["--member-id", name, "--partitions", str(PARTITIONS), "--shards", str(SHARDS), *self.indexer_words]
        member = Member(Child(name, words, "is ready", self.folder), nats, redis)
        self.stack.callback(member.child.close)
        self.members.append(member)
        return member

    async def close_store(self) -> None:
        await self.store.close()

    async def move_to(self, valkey: EmbeddedServer) -> None:
        """Everybody reaches this store instead, new connections from now on."""
        self.valkey = valkey
        await self.store.close()
        self.store = self.checker.store = await open_store(valkey.url)
        for member in self.members:
            member.redis.target_port = valkey.port
            member.redis.reset()

    @property
    def proxies(self) -> list[TcpProxy]:
        of_workers = [proxy for one in self.workers for proxy in (one.events, one.replay, one.nats)]
        return of_workers + [proxy for member in self.members for proxy in (member.nats, member.redis)]

    @property
    def children(self) -> list[Child]:
        of_workers = [child for worker in self.workers for child in (worker.engine, worker.sidecar)]
        return of_workers + [member.child for member in self.members]

    async def mend(self) -> None:
        """Everything runs and every line is whole afterwards, whatever was broken."""
        for proxy in self.proxies:
            proxy.heal()
        for server in (self.nats_server, self.valkey):
            if server.is_running:
                server.resume()
            else:
                await server.start()
        await until(self._has_room, deadline_s=20, what="the store has room")
        started = []
        for child in self.children:
            if child.paused:
                child.resume()
            elif not child.is_running:
                child.start()
                started.append(child)
        for child in started:
            await child.ready()
        await until(self._are_awake, deadline_s=20, what="the engines are awake")

    async def _has_room(self) -> bool:
        """It has afterwards, if it answers."""
        try:
            await self.store.client.config_set("maxmemory", 0)
        except (RedisError, OSError):
            return False
        return True

    async def _are_awake(self) -> bool:
        """They are afterwards, if they answer."""
        try:
            async with httpx.AsyncClient(timeout=2, trust_env=False) as client:
                for worker in self.workers:
                    (await client.post(f"{worker.url}/wake_up")).raise_for_status()
        except httpx.HTTPError:
            return False
        return True

    async def empty_engine(self, worker: Worker) -> None:
        """Its cache is reset, so that all that it holds from now on has been told."""
        async with httpx.AsyncClient(timeout=5, trust_env=False) as client:

            async def is_reset() -> bool:
                url = f"{worker.url}/reset_prefix_cache?reset_external=true"
                return (await client.post(url)).is_success

            await until(is_reset, deadline_s=20, what=f"{worker.worker_id} drops its cache")

    async def events_sent(self) -> int:
        """Engine events that the running sidecars have taken since their start; one that doesn't answer counts none."""
        total = 0
        for worker in self.workers:
            if worker.sidecar.is_running:
                status = (await self.checker.status(worker.worker_id)).status or {}
                total += int(status["counters"]["engine_events"])
        return total


@asynccontextmanager
async def running_fleet(
    folder: Path,
    *,
    engines: int,
    indexers: int,
    seed: int,
    indexer_words: Sequence[str] = (),
    large: int = 0,
    nats: EmbeddedServer | None = None,
) -> AsyncIterator[Fleet]:
    """All parts answer, the load rests. Nothing is left of it afterwards. `large`: so many of the engines are large. `nats`: a
    running server to use; default: one of its own."""
    async with AsyncExitStack() as stack:
        if nats is None:
            config = f"max_pending: {NATS_PENDING_BYTES}"
            nats = await stack.enter_async_context(nats_server(data_dir=folder / "nats", config=config))
        valkey = await stack.enter_async_context(valkey_server(data_dir=folder / "valkey", appendonly=True))
        urls: dict[str, str] = {}
        blocks = [LARGE_BLOCKS] * large + [GPU_BLOCKS] * (engines - large)
        workers = [await _worker(stack, folder, nats, f"engine-{i}", urls, blocks[i]) for i in range(engines)]
        client = await connect_nats(nats.url, name="chaos")
        stack.push_async_callback(client.close)
        store = await open_store(valkey.url)
        load = Load(urls, (None, None, ADAPTER), seed)
        checker = Checker(MODEL, urls, client, store)
        fleet = Fleet(
            folder, nats, valkey, client, store, workers, [], load, checker, stack, indexers, large, list(indexer_words)
        )
        stack.push_async_callback(fleet.close_store)
        for _ in range(indexers):
            await fleet.add_member()
        for member in fleet.members:
            member.child.start()
        for worker in workers:
            worker.engine.start()
        for worker in workers:
            await worker.engine.ready()
            worker.sidecar.start()
        for member in fleet.members:
            await member.child.ready()
        for worker in workers:
            await worker.sidecar.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await fleet.fill_large()
            yield fleet
            tasks.cancel_scope.cancel()


async def _worker(
    stack: AsyncExitStack, folder: Path, nats: EmbeddedServer, worker_id: str, urls: dict[str, str], gpu_blocks: int
) -> Worker:
    http, events_port, replay_port = free_port(), free_port(), free_port()
    urls[worker_id] = f"http://{LOOPBACK}:{http}"
    words = ["simulate-engine", "--model", MODEL, "--adapters", ADAPTER, "--port", str(http), "--speed-up", "100000"]
    words += ["--endpoint", f"tcp://{LOOPBACK}:{events_port}", "--replay-endpoint", f"tcp://{LOOPBACK}:{replay_port}"]
    words += ["--block-size", str(BLOCK), "--num-gpu-blocks", str(gpu_blocks), "--num-cpu-blocks", str(CPU_BLOCKS)]
    engine = Child(worker_id, words, "engine at", folder)
    stack.callback(engine.close)
    events = await stack.enter_async_context(TcpProxy(events_port, f"event socket of {worker_id}"))
    replay = await stack.enter_async_context(TcpProxy(replay_port, f"replay socket of {worker_id}"))
    bus = await stack.enter_async_context(TcpProxy(nats.port, f"{worker_id} to NATS"))
    state_dir = folder / f"{worker_id}-state"
    sidecar_words = ["publish", "--engine", "vllm", "--worker-id", worker_id, "--model-id", MODEL]
    sidecar_words += ["--endpoint", f"tcp://{LOOPBACK}:{events.port}", "--engine-url", urls[worker_id]]
    sidecar_words += ["--replay-endpoint", f"tcp://{LOOPBACK}:{replay.port}", "--partitions", str(PARTITIONS)]
    sidecar_words += ["--outbox-bytes", str(OUTBOX_BYTES), "--nats-url", f"nats://{LOOPBACK}:{bus.port}"]
    sidecar = Child(f"{worker_id}-sidecar", [*sidecar_words, "--state-dir", str(state_dir)], "is published", folder)
    stack.callback(sidecar.close)
    return Worker(worker_id, urls[worker_id], engine, sidecar, events, replay, bus, state_dir, sidecar_words)
