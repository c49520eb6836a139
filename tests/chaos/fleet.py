"""A whole fleet of real processes, with a proxy in every connection that can break."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
from nats.aio.client import Client
from redis.exceptions import RedisError

from benchmarks.store_calls import SLOW_LOG, StoreCall, StoreCalls
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store, open_store
from tests.chaos.child_process import ChildProcess
from tests.chaos.clusters.store_cluster import StoreCluster, slot_of_shard
from tests.chaos.credentials import identities_file, nats_config
from tests.chaos.exactness import Checker, Residence, residences_of_export
from tests.chaos.load import BLOCK, Load
from tests.chaos.proxy import LOOPBACK, TcpProxy
from tests.end_to_end.processes import ROOT, query
from tests.eventually import until
from tests.http_client import http_client

MODEL = "chaos-model"
ADAPTER = "chaos-adapter"
PARTITIONS = 16
SHARDS = 4
OWN_LAYOUT = ("--partitions", str(PARTITIONS), "--shards", str(SHARDS))
OUTBOX_BYTES = 24 * 1024
GPU_BLOCKS = 500
CPU_BLOCKS = 120
HYBRID_BLOCKS = 900
"""Blocks of a hybrid engine, for all groups."""
LARGE_BLOCKS = 12_000
"""Blocks of a large engine, whose snapshots need a grant."""
NATS_PENDING_BYTES = 8 << 20
"""How much the server buffers for a slow connection; the default is 64 MiB."""
RETIRE_AFTER_S = 8
"""Setting of the indexers in scenarios, instead of a minute, so that no scenario has to wait that long."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model: the flags of its engine and of its publisher."""

    engine_flags: tuple[str, ...]
    sidecar_flags: tuple[str, ...] = ()


FULL = Model(("--num-gpu-blocks", str(GPU_BLOCKS), "--num-cpu-blocks", str(CPU_BLOCKS)))
LARGE = Model(("--num-gpu-blocks", str(LARGE_BLOCKS), "--num-cpu-blocks", str(CPU_BLOCKS)))
HYBRID = Model(
    ("--groups", "full,swa:40,mamba,chunked:128", "--num-gpu-blocks", str(HYBRID_BLOCKS)), ("--chunk-size", "128")
)
"""Its engines evict all the time, each group separately."""


@dataclass(slots=True)
class Worker:
    """One engine and its sidecar."""

    worker_id: str
    url: str
    engine: ChildProcess
    sidecar: ChildProcess
    events: TcpProxy
    replay: TcpProxy
    nats: TcpProxy
    """Its line to the first NATS server."""
    state_dir: Path
    sidecar_arguments: Sequence[str]

    @property
    def state_file(self) -> Path:
        return self.state_dir / f"{self.worker_id}.state"

    def second_sidecar(self) -> ChildProcess:
        """Another publisher of the same worker, without saved state; not started."""
        return ChildProcess(f"{self.worker_id}-second", self.sidecar_arguments, "is published", self.state_dir.parent)


@dataclass(slots=True)
class Indexer:
    """One replica of the indexer."""

    child: ChildProcess
    nats: TcpProxy
    redis: TcpProxy


@dataclass(slots=True)
class Fleet:
    """Everything that runs. `nats_client` and `store` are connected without proxies."""

    folder: Path
    nats_servers: Sequence[EmbeddedServer]
    valkey: EmbeddedServer
    """The store, or the first server of its cluster."""
    cluster: StoreCluster | None
    lines: list[TcpProxy]
    """Lines to the servers of clusters, in addition to those of each process."""
    nats_client: Client
    store: Store
    workers: list[Worker]
    indexers: list[Indexer]
    load: Load
    checker: Checker
    stack: AsyncExitStack
    initial_indexers: int
    trees: Sequence[Path]
    """The checkouts whose versions may run."""
    large: int = 0
    """How many of the workers, from the first, have a large cache."""
    indexer_arguments: list[str] = field(default_factory=list)
    store_calls: list[StoreCall] = field(default_factory=list)
    function_loads: list[StoreCall] = field(default_factory=list)

    @property
    def nats_server(self) -> EmbeddedServer:
        """The first NATS server."""
        return self.nats_servers[0]

    @property
    def servers(self) -> list[EmbeddedServer]:
        """The servers of NATS and of the store."""
        return [*self.nats_servers, *(self.cluster.nodes if self.cluster else [self.valkey])]

    @property
    def store_url(self) -> str:
        return self.cluster.url if self.cluster else self.valkey.url

    async def fill_large(self) -> None:
        """Fill the large engines' caches to nine tenths."""
        for worker in self.workers[: self.large]:
            await self.load.fill(worker.worker_id, LARGE_BLOCKS * 9 // 10)

    async def export(self) -> dict[str, set[Residence]]:
        """The output of `kvatlas export`, by worker."""
        return residences_of_export((await query("export", "--redis-url", self.store_url)).splitlines())

    async def add_indexer(self, *layout: str) -> Indexer:
        """One more replica, not started. `layout`: flags for a layout other than the fleet's."""
        name = f"indexer-{len(self.indexers)}"
        nats, *more = await _nats_lines(self.stack, self.nats_servers, name)
        self.lines += more
        redis = await self.stack.enter_async_context(TcpProxy(self.valkey.port, f"{name} to Redis"))
        redis_url = self.cluster.url if self.cluster else f"redis://{LOOPBACK}:{redis.port}"
        arguments = ["indexer", "--nats-url", _nats_url([nats, *more]), "--redis-url", redis_url, "--member-id", name]
        arguments += [*(layout or OWN_LAYOUT), *self.indexer_arguments]
        indexer = Indexer(ChildProcess(name, arguments, "is ready", self.folder), nats, redis)
        self.stack.callback(indexer.child.close)
        self.indexers.append(indexer)
        return indexer

    async def note_store_call(self) -> None:
        """Remember the longest calls to the store so far: a store that restarts forgets them."""
        calls = StoreCalls(self.store)
        self.store_calls += filter(None, [await calls.longest()])
        self.function_loads += filter(None, [await calls.longest_load()])

    async def close_store(self) -> None:
        await self.store.close()

    async def switch_store(self, valkey: EmbeddedServer) -> None:
        """Connect all processes to this store instead, from their next connection on."""
        self.valkey = valkey
        await self.store.close()
        self.store = self.checker.store = await open_store(valkey.url)
        for indexer in self.indexers:
            indexer.redis.target_port = valkey.port
            indexer.redis.reset()

    async def switch_nats(self, server: EmbeddedServer) -> None:
        """Connect all processes to this NATS server instead."""
        self.nats_servers = [server]
        self.nats_client = self.checker.nats = await connect_nats(server.url, name="chaos")
        self.stack.push_async_callback(self.nats_client.close)
        for proxy in [one.nats for one in self.workers] + [indexer.nats for indexer in self.indexers]:
            proxy.target_port = server.port
            proxy.reset()

    @property
    def proxies(self) -> list[TcpProxy]:
        of_workers = [proxy for one in self.workers for proxy in (one.events, one.replay, one.nats)]
        of_indexers = [proxy for indexer in self.indexers for proxy in (indexer.nats, indexer.redis)]
        return of_workers + of_indexers + self.lines

    @property
    def children(self) -> list[ChildProcess]:
        of_workers = [child for worker in self.workers for child in (worker.engine, worker.sidecar)]
        return of_workers + [indexer.child for indexer in self.indexers]

    async def heal(self) -> None:
        """Start what was stopped and repair every connection, whatever was broken."""
        for proxy in self.proxies:
            proxy.heal()
        for server in self.servers:
            if server.is_running:
                server.resume()
            else:
                await server.start()
        if self.cluster is not None:
            await self.cluster.repair({slot_of_shard(shard) for shard in range(SHARDS)})
        await until(self._has_room, what="the store has room")
        for child in self.children:
            if child.paused:
                child.resume()
            elif not child.is_running:
                child.start()
        for child in self.children:  # including one that the scenario has just started
            await child.ready()
        await until(self._are_awake, what="the engines are awake")

    async def _has_room(self) -> bool:
        """Lift the store's memory limit; in a cluster also on replicas, since one may become a primary. True if all servers
        answered."""
        try:
            if self.cluster is None:
                await self.store.client.config_set("maxmemory", 0)
            else:
                for node in self.cluster.nodes:
                    await self.cluster.command(node, "CONFIG SET", "maxmemory", 0)
        except (RedisError, OSError):
            return False
        return True

    async def _are_awake(self) -> bool:
        """Wake the engines. True if they answered."""
        try:
            async with http_client(timeout=2) as client:
                for worker in self.workers:
                    (await client.post(f"{worker.url}/wake_up")).raise_for_status()
        except httpx.HTTPError:
            return False
        return True

    async def empty_engine(self, worker: Worker) -> None:
        """Reset its cache, so that from now on its publisher knows everything that it holds."""
        async with http_client(timeout=5) as client:

            async def is_reset() -> bool:
                url = f"{worker.url}/reset_prefix_cache?reset_external=true"
                return (await client.post(url)).is_success

            await until(is_reset, what=f"{worker.worker_id} drops its cache")

    async def events_sent(self) -> int:
        """Engine events that the running sidecars have received since their start."""
        total = 0
        for worker in self.workers:
            if worker.sidecar.is_running:
                status = (await self.checker.status(worker.worker_id)).status or {}
                total += int(status["counters"]["engine_events"])
        return total


def single_nats(folder: Path) -> AbstractAsyncContextManager[EmbeddedServer]:
    """A NATS server with the fleet's users that gives up slow connections early."""
    return nats_server(data_dir=folder, config=f"max_pending: {NATS_PENDING_BYTES}\n{nats_config()}")


@asynccontextmanager
async def running_fleet(
    folder: Path,
    *,
    engines: int,
    indexers: int,
    seed: int,
    indexer_arguments: Sequence[str] = (),
    large: int = 0,
    hybrids: int = 0,
    nats: Sequence[EmbeddedServer] = (),
    cluster: StoreCluster | None = None,
    tree: Path = ROOT,
) -> AsyncIterator[Fleet]:
    """A fleet whose parts all answer, with the load paused; afterwards nothing is left of it. `large`: number of engines, from
    the first, that are large; `hybrids`: number, from the last, that run a hybrid model. `nats`, `cluster`: running servers to
    use; default: new ones. `tree`: the checkout whose indexers and sidecars run."""
    async with AsyncExitStack() as stack:
        if not nats:
            nats = [await stack.enter_async_context(single_nats(folder / "nats"))]
        if cluster is None:
            valkey = await stack.enter_async_context(
                valkey_server(data_dir=folder / "valkey", appendonly=True, settings=SLOW_LOG)
            )
        else:
            valkey = cluster.nodes[0]
        lines = list(cluster.lines) if cluster else []
        urls: dict[str, str] = {}
        models = [LARGE] * large + [FULL] * (engines - large - hybrids) + [HYBRID] * hybrids
        workers = [await _worker(stack, folder, nats, lines, f"engine-{i}", urls, models[i]) for i in range(engines)]
        client = await connect_nats(",".join(server.url for server in nats), name="chaos")
        stack.push_async_callback(client.close)
        store = await open_store(cluster.url if cluster else valkey.url)
        load = Load(urls, (None, None, ADAPTER), seed)
        identities = folder / "identities.json"
        identities.write_text(identities_file())
        checker = Checker(MODEL, urls, client, store)
        fleet = Fleet(
            folder=folder,
            nats_servers=nats,
            valkey=valkey,
            cluster=cluster,
            lines=lines,
            nats_client=client,
            store=store,
            workers=workers,
            indexers=[],
            load=load,
            checker=checker,
            stack=stack,
            initial_indexers=indexers,
            trees=tuple({tree, ROOT}),
            large=large,
            indexer_arguments=["--identities", str(identities), *indexer_arguments],
        )
        stack.push_async_callback(fleet.close_store)
        for _ in range(indexers):
            await fleet.add_indexer()
        for child in [*(indexer.child for indexer in fleet.indexers), *(worker.sidecar for worker in workers)]:
            child.tree = tree
        for indexer in fleet.indexers:
            indexer.child.start()
        for worker in workers:
            worker.engine.start()
        for worker in workers:
            await worker.engine.ready()
            worker.sidecar.start()
        for indexer in fleet.indexers:
            await indexer.child.ready()
        for worker in workers:
            await worker.sidecar.ready()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            await fleet.fill_large()
            yield fleet
            tasks.cancel_scope.cancel()


async def _nats_lines(stack: AsyncExitStack, servers: Sequence[EmbeddedServer], name: str) -> list[TcpProxy]:
    """A process's lines, one to each NATS server."""
    return [await stack.enter_async_context(TcpProxy(server.port, f"{name} to NATS")) for server in servers]


def _nats_url(lines: Sequence[TcpProxy]) -> str:
    return ",".join(f"nats://{LOOPBACK}:{line.port}" for line in lines)


async def _worker(
    stack: AsyncExitStack,
    folder: Path,
    nats: Sequence[EmbeddedServer],
    lines: list[TcpProxy],
    worker_id: str,
    urls: dict[str, str],
    model: Model,
) -> Worker:
    """`lines` gets the lines to all NATS servers but the first."""
    http, events_port, replay_port = free_port(), free_port(), free_port()
    urls[worker_id] = f"http://{LOOPBACK}:{http}"
    arguments = [
        "simulate-engine",
        "--model",
        MODEL,
        "--adapters",
        ADAPTER,
        "--port",
        str(http),
        "--speed-up",
        "100000",
        "--answers-text",
    ]
    arguments += [
        "--endpoint",
        f"tcp://{LOOPBACK}:{events_port}",
        "--replay-endpoint",
        f"tcp://{LOOPBACK}:{replay_port}",
    ]
    arguments += ["--block-size", str(BLOCK), *model.engine_flags]
    engine = ChildProcess(worker_id, arguments, "engine at", folder)
    stack.callback(engine.close)
    events = await stack.enter_async_context(TcpProxy(events_port, f"event socket of {worker_id}"))
    replay = await stack.enter_async_context(TcpProxy(replay_port, f"replay socket of {worker_id}"))
    bus, *more = await _nats_lines(stack, nats, worker_id)
    lines += more
    state_dir = folder / f"{worker_id}-state"
    sidecar_arguments = ["publish", "--engine", "mock", "--worker-id", worker_id, "--model-id", MODEL]
    sidecar_arguments += ["--endpoint", f"tcp://{LOOPBACK}:{events.port}", "--engine-url", urls[worker_id]]
    sidecar_arguments += ["--replay-endpoint", f"tcp://{LOOPBACK}:{replay.port}", "--partitions", str(PARTITIONS)]
    sidecar_arguments += [
        *model.sidecar_flags,
        "--outbox-bytes",
        str(OUTBOX_BYTES),
        "--nats-url",
        _nats_url([bus, *more]),
    ]
    sidecar = ChildProcess(
        f"{worker_id}-sidecar", [*sidecar_arguments, "--state-dir", str(state_dir)], "is published", folder
    )
    stack.callback(sidecar.close)
    return Worker(worker_id, urls[worker_id], engine, sidecar, events, replay, bus, state_dir, sidecar_arguments)
