"""What is done to a fleet, and undone; and what has to be said of it."""

import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import httpx
from redis.asyncio import Redis

from kvatlas.embedded import valkey_server
from kvatlas.embedded.free_port import free_port
from tests.oncall.fleet import Fleet, child, engine, sidecar

Made = Callable[[Fleet], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`answer`: what doctor's first line has to contain. `checks`: each check with what its line has to contain; nothing but
    these and `also` may be wrong. `alert`: the one that fires; `page`: what the router's or the indexer's /status has to
    contain; `log`: what some part's log has to. Empty: nothing is asked."""

    made: Made
    answer: str
    checks: Mapping[str, str]
    also: frozenset[str] = frozenset()
    alert: str = ""
    page: str = ""
    log: str = ""


@asynccontextmanager
async def all_engines_drain(fleet: Fleet) -> AsyncIterator[None]:
    async with httpx.AsyncClient(trust_env=False, timeout=5) as client:
        for one in fleet.sidecars:
            await one.stop()
        yield
        for one in fleet.sidecars:
            one.start()
        for one in fleet.sidecars:
            await one.ready()
        assert client is not None


@asynccontextmanager
async def engine_stands_still(fleet: Fleet) -> AsyncIterator[None]:
    """As a GPU that hangs: the process is there, and computes nothing."""
    fleet.engines[0].pause()
    yield
    fleet.engines[0].resume()


@asynccontextmanager
async def sidecar_is_killed(fleet: Fleet) -> AsyncIterator[None]:
    fleet.sidecars[0].kill()
    yield
    fleet.sidecars[0].start()
    await fleet.sidecars[0].ready()


@asynccontextmanager
async def second_fleet_on_this_nats(fleet: Fleet) -> AsyncIterator[None]:
    """Another indexer, with a store of its own."""
    async with valkey_server() as store:
        flags = ["--nats-url", fleet.nats.url, "--redis-url", store.url]
        other = child(fleet, "other-indexer", "belongs to fleet", "indexer", *flags)
        other.start()
        with anyio.fail_after(30):
            while other.is_running:
                await anyio.sleep(0.1)  # it ends by itself
        fleet.parts["other-indexer"] = other
        yield
        del fleet.parts["other-indexer"]


@asynccontextmanager
async def same_worker_id_twice(fleet: Fleet) -> AsyncIterator[None]:
    ports = [free_port(), free_port(), free_port()]
    async with AsyncExitStack() as stack:
        for one in (engine(fleet, "engine-twin", ports), sidecar(fleet, "sidecar-twin", "w0", ports)):
            stack.callback(one.close)
            one.start()
            await one.ready()
        yield


@asynccontextmanager
async def few_descriptors(fleet: Fleet) -> AsyncIterator[None]:
    pid = fleet.parts["router"].pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (40, before[1]))
    yield
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@asynccontextmanager
async def managed_store_that_evicts(fleet: Fleet) -> AsyncIterator[None]:
    """Its policy changes behind a CONFIG that is refused."""
    async with Redis.from_url(fleet.store.url) as store:
        await store.config_set("maxmemory-policy", "allkeys-lru")
        await store.execute_command("ACL", "SETUSER", "default", "-config")  # type: ignore[no-untyped-call]
        yield
        await store.execute_command("ACL", "SETUSER", "default", "+config")  # type: ignore[no-untyped-call]
        await store.config_set("maxmemory-policy", "noeviction")


@asynccontextmanager
async def distant_store(fleet: Fleet) -> AsyncIterator[None]:
    fleet.near.delay_s = 0.04
    yield
    fleet.near.heal()


@asynccontextmanager
async def indexer_is_gone(fleet: Fleet) -> AsyncIterator[None]:
    fleet.parts["indexer"].kill()
    yield
    fleet.parts["indexer"].start()
    await fleet.parts["indexer"].ready()


@asynccontextmanager
async def bus_stands_still(fleet: Fleet) -> AsyncIterator[None]:
    fleet.nats.pause()
    yield
    fleet.nats.resume()


FAULTS: Mapping[str, Fault] = {
    "all_engines_drain": Fault(
        all_engines_drain,
        "? No, because no engine can take it",
        {},
        frozenset({"routers.refused", "workers.heartbeats", "workers.engines"}),
        alert="KvatlasNoWorkers",
    ),
    "engine_stands_still": Fault(
        engine_stands_still,
        "? Yes, by 1 of 2 engines",
        {},
        frozenset(
            {
                "routers.progress",
                "workers.engines",
                "workers.load",
                "routers.refused",
                "routers.gone",
                "workers.settings",
            }
        ),
    ),
    "sidecar_is_killed": Fault(
        sidecar_is_killed,
        "? Yes, by 1 of ",
        {},
        frozenset({"workers.heartbeats", "workers.missing"}),
        alert="KvatlasWorkersLost",
    ),
    "second_fleet_on_this_nats": Fault(
        second_fleet_on_this_nats, "? Yes, by 2 of 2", {}, log="of another fleet, with the store"
    ),
    "same_worker_id_twice": Fault(
        same_worker_id_twice, "", {"workers.duplicates": "w0 has two publishers"}, log="give each its own --worker-id"
    ),
    "few_descriptors": Fault(
        few_descriptors,
        "",
        {"routers.descriptors": "of at most 40 file descriptors"},
        frozenset({"routers.gone", "routers.store", "routers.refused"}),
        alert="KvatlasDescriptorsShort",
        page='"most_descriptors": 40',
    ),
    "managed_store_that_evicts": Fault(
        managed_store_that_evicts,
        "",
        {"store.policy": "parameter group"},
        alert="KvatlasStoreEvicts",
        log="expected maxmemory-policy noeviction",
    ),
    "distant_store": Fault(
        distant_store,
        "",
        {"store.distance": "a round trip to the store takes"},
        frozenset({"routers.store", "routers.answers", "workers.index", "workers.load"}),
    ),
    "indexer_is_gone": Fault(
        indexer_is_gone,
        "? By load only, because no indexer is running",
        {"indexers.members": "no indexer is running"},
        frozenset({"indexers.leases", "workers.index", "workers.load", "clocks", "routers.answers"}),
        alert="KvatlasNoIndexer",
    ),
    "bus_stands_still": Fault(
        bus_stands_still, "", {"nats.reachable": "no answer in time"}, frozenset({"workers.heartbeats", "workers.load"})
    ),
}
