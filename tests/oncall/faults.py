"""Faults in a fleet and their repair, and what has to be said about each."""

import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
from redis.asyncio import Redis

from kvatlas.embedded import valkey_server
from kvatlas.embedded.free_port import free_port
from tests.chaos.child_process import ChildProcess
from tests.end_to_end.processes import ROOT
from tests.http_client import http_client
from tests.oncall.fleet import MODEL, PATIENT_MS, Fleet, child, engine, sidecar

SHIFTED_CLOCK = Path(__file__).parent / "shifted_clock"

Made = Callable[[Fleet], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what has to be said about it; empty: nothing is required.

    `answer`: text that doctor's first line has to contain. `checks`: for each check, text that its line has to contain; only
    these and `also` may find anything. `alert`: the alert that fires; only it and `also_alerts` may. `page`: text that the
    router's or the indexer's /status has to contain; `log`: text that some part's log has to contain. `loses`: requests may be
    lost while it lasts. `deadline_ms`: how long the router's decisions wait.
    """

    made: Made
    answer: str
    checks: Mapping[str, str] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    alert: str = ""
    also_alerts: frozenset[str] = frozenset()
    page: str = ""
    log: str = ""
    loses: bool = False
    deadline_ms: int = PATIENT_MS


@asynccontextmanager
async def all_engines_drain(fleet: Fleet) -> AsyncIterator[None]:
    for one in fleet.sidecars:
        await one.stop()
    yield
    for one in fleet.sidecars:
        one.start()
    for one in fleet.sidecars:
        await one.ready()


@asynccontextmanager
async def engine_stands_still(fleet: Fleet) -> AsyncIterator[None]:
    """As with a GPU that hangs: the process is there, but computes nothing."""
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
    """Another indexer, with its own store."""
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
    """Its policy changes while CONFIG is refused."""
    async with Redis.from_url(fleet.store.url) as store:
        await store.config_set("maxmemory-policy", "allkeys-lru")
        await store.execute_command("ACL", "SETUSER", "default", "-config")  # type: ignore[no-untyped-call]
        yield
        await store.execute_command("ACL", "SETUSER", "default", "+config")  # type: ignore[no-untyped-call]
        await store.config_set("maxmemory-policy", "noeviction")


@asynccontextmanager
async def distant_store(fleet: Fleet) -> AsyncIterator[None]:
    fleet.near.delay_s = ONE_WAY_S
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


@asynccontextmanager
async def sidecar_stands_still(fleet: Fleet) -> AsyncIterator[None]:
    fleet.sidecars[0].pause()
    yield
    fleet.sidecars[0].resume()


def _wrong_clock(part: str, ready: str, by_s: int) -> Made:
    @asynccontextmanager
    async def clock_is_wrong(fleet: Fleet) -> AsyncIterator[None]:
        path = f"{SHIFTED_CLOCK}:{ROOT}"
        await fleet.replace(part, ready, PYTHONPATH=path, ONCALL_CLOCK_SHIFT_S=str(by_s))
        yield
        await fleet.replace(part, ready, PYTHONPATH=str(ROOT))

    return clock_is_wrong


@asynccontextmanager
async def engine_is_killed(fleet: Fleet) -> AsyncIterator[None]:
    fleet.engines[0].kill()
    yield
    fleet.engines[0].start()
    await fleet.engines[0].ready()


@asynccontextmanager
async def store_stands_still(fleet: Fleet) -> AsyncIterator[None]:
    fleet.store.pause()
    yield
    fleet.store.resume()


@asynccontextmanager
async def store_comes_back_empty(fleet: Fleet) -> AsyncIterator[None]:
    await fleet.store.kill()
    await fleet.store.start()
    yield


@asynccontextmanager
async def bus_comes_back_empty(fleet: Fleet) -> AsyncIterator[None]:
    await fleet.nats.kill()
    await fleet.nats.start()
    yield


@asynccontextmanager
async def index_is_flushed(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.store.url) as store:
        await store.flushall()
    yield


@asynccontextmanager
async def bus_is_gone(fleet: Fleet) -> AsyncIterator[None]:
    await fleet.nats.kill()
    yield
    await fleet.nats.start()


@asynccontextmanager
async def publisher_of_another_fleet(fleet: Fleet) -> AsyncIterator[None]:
    """It has its own fleet's id, but this fleet's NATS and a worker id that is taken here."""
    ports = [free_port(), free_port(), free_port()]
    other = sidecar(fleet, "sidecar-other", "w0", ports, "--fleet-id", OTHER_FLEET)
    other.start()
    with anyio.fail_after(30):
        while other.is_running:
            await anyio.sleep(0.1)  # it ends by itself
    fleet.parts["sidecar-other"] = other
    yield
    del fleet.parts["sidecar-other"]


@asynccontextmanager
async def one_engine_published_twice(fleet: Fleet) -> AsyncIterator[None]:
    """Under two worker ids."""
    async with _more(fleet, sidecar(fleet, "sidecar-2", "w2", fleet.engine_ports[0])):
        yield


@asynccontextmanager
async def model_under_a_wrong_name(fleet: Fleet) -> AsyncIterator[None]:
    ports = [free_port(), free_port(), free_port()]
    one = sidecar(fleet, "sidecar-2", "w2", ports, model_id="other")
    async with _more(fleet, engine(fleet, "engine-2", ports), one):
        yield


@asynccontextmanager
async def _more(fleet: Fleet, *parts: ChildProcess) -> AsyncIterator[None]:
    """Run additional parts for a while; sidecars are stopped properly."""
    async with AsyncExitStack() as stack:
        for one in parts:
            stack.callback(one.close)
            one.start()
            await one.ready()
        yield
        await parts[-1].stop()


@asynccontextmanager
async def clients_give_up(fleet: Fleet) -> AsyncIterator[None]:
    """Clients other than those whose requests are counted."""
    async with http_client(base_url=fleet.router_url, timeout=0.3) as client:

        async def ask() -> None:
            body = {"model": MODEL, "prompt": "A long answer.", "max_tokens": 4_000}
            while True:
                with suppress(httpx.HTTPError):
                    await client.post("/v1/completions", json=body)

        async with anyio.create_task_group() as group:
            group.start_soon(ask)
            yield
            group.cancel_scope.cancel()


OTHER_FLEET = "00000000000b"
ONE_WAY_S, FAR_DEADLINE_MS = 0.075, 300
SILENT = frozenset({"workers.heartbeats", "workers.missing", "workers.load", "workers.index"})
FAULTS: Mapping[str, Fault] = {
    "all_engines_drain": Fault(
        all_engines_drain,
        "? No, because no",  # engine can take it; or after a minute: none of its workers is left
        also=frozenset({"routers.refused", "workers.heartbeats", "workers.engines"}),
        alert="KvatlasNoWorkers",
        also_alerts=frozenset({"KvatlasRequestsFail"}),
        loses=True,
    ),
    "engine_stands_still": Fault(
        engine_stands_still,
        "? Yes, by 1 of 2 engines",
        also=frozenset(
            {
                "routers.progress",
                "workers.engines",
                "workers.load",
                "workers.settings",
                "routers.gone",
                "routers.answers",
            }
        ),  # prompts that move to the other engine together find blocks stored after their choice
        also_alerts=frozenset({"KvatlasEngineStalled"}),
    ),
    "sidecar_is_killed": Fault(
        sidecar_is_killed,
        "? Yes, by 1 of ",
        also=frozenset({"workers.heartbeats", "workers.missing"}),
        alert="KvatlasWorkersLost",
    ),
    "sidecar_stands_still": Fault(sidecar_stands_still, "? Yes, by 1 of ", also=SILENT, alert="KvatlasWorkersLost"),
    "second_fleet_on_this_nats": Fault(
        second_fleet_on_this_nats, "? Yes, by 2 of 2", log="of another fleet, with the store"
    ),
    "same_worker_id_twice": Fault(
        same_worker_id_twice, "", {"workers.duplicates": "w0 has two publishers"}, log="give each its own --worker-id"
    ),
    "few_descriptors": Fault(
        few_descriptors,
        "",
        {"routers.descriptors": "of at most 40 file descriptors"},
        also=frozenset({"routers.gone", "routers.store", "routers.refused"}),
        alert="KvatlasDescriptorsShort",
        page='"most_descriptors": 40',
        loses=True,
    ),
    "managed_store_that_evicts": Fault(
        managed_store_that_evicts,
        "",
        {"store.policy": "parameter group"},
        alert="KvatlasStoreEvicts",
        log="set maxmemory-policy to noeviction",
    ),
    "distant_store": Fault(
        distant_store,
        "? Yes, by 2 of 2",
        {"store.distance": "a round trip to the store takes", "routers.distance": "a choice waits only for the index"},
        also=frozenset({"routers.answers", "routers.store"}),
        also_alerts=frozenset({"KvatlasDecisionsSlow", "KvatlasStoreFails"}),
        deadline_ms=FAR_DEADLINE_MS,
    ),
    "indexer_is_gone": Fault(
        indexer_is_gone,
        "? By load only, because no indexer is running",
        {"indexers.members": "no indexer is running"},
        also=frozenset({"indexers.leases", "workers.index", "workers.load", "clocks", "routers.answers"}),
        alert="KvatlasNoIndexer",
    ),
    "bus_stands_still": Fault(
        bus_stands_still,
        "? By load only, because NATS does not answer",
        {"nats.reachable": "no answer in time"},
        also=frozenset({"workers.load", "routers.answers"}),
        also_alerts=frozenset({"KvatlasPartitionsWithoutOwner", "KvatlasNoIndexer"}),
    ),
    "clock_of_the_indexer": Fault(
        _wrong_clock("indexer", "is ready", -2 * 3_600), "? Yes, by 2 of 2", {"clocks": "-2.0 h"}
    ),
    "clock_of_the_router": Fault(
        _wrong_clock("router", "router at", 86_400), "? Yes, by 2 of 2", {"clocks": "+1.0 d"}, loses=True
    ),
    # ten more
    "engine_is_killed": Fault(
        engine_is_killed,
        "? Yes, by 1 of 2 engines (w0: down)",
        {"workers.engines": "engines down: w0"},
        also=frozenset({"workers.settings", "workers.load"}),
    ),
    "store_stands_still": Fault(
        store_stands_still,
        "? By load only, and only by routers that already run, because",
        {"store.reachable": ""},
        alert="KvatlasStoreFails",
        also_alerts=frozenset({"KvatlasDecisionsWithoutIndex", "KvatlasPartitionsWithoutOwner"}),
    ),
    # until the index is complete again, more is cached than was predicted
    "store_comes_back_empty": Fault(store_comes_back_empty, "? Yes, by 2 of 2", also=frozenset({"routers.answers"})),
    "bus_comes_back_empty": Fault(bus_comes_back_empty, "? Yes, by 2 of 2"),
    "bus_is_gone": Fault(
        bus_is_gone,
        "? By load only, because NATS does not answer",
        {"nats.reachable": "refused"},
        also=frozenset({"workers.load", "routers.answers"}),
        also_alerts=frozenset({"KvatlasPartitionsWithoutOwner", "KvatlasNoIndexer"}),
    ),
    "index_is_flushed": Fault(index_is_flushed, "? Yes, by 2 of 2", also=frozenset({"routers.answers"})),
    "publisher_of_another_fleet": Fault(
        publisher_of_another_fleet,
        "? Yes, by 2 of 2",
        log="a publisher of another fleet, 00000000000b, uses this NATS, for w0",
    ),
    "one_engine_published_twice": Fault(
        one_engine_published_twice, "", {"workers.address": "w0, w2 have the same address"}
    ),
    "model_under_a_wrong_name": Fault(model_under_a_wrong_name, "? Yes", {"pools.models": "--model-id is other"}),
    "clients_give_up": Fault(
        clients_give_up,
        "? Yes, by 2 of 2",
        {"routers.gone": "clients of the last minute gave up"},
        alert="KvatlasClientsGaveUp",
    ),
}
