"""The whole examination: checks NATS, the store and the workers, and returns all findings in order."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.blocks.hashing import is_compiled
from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamInfo, stream_fleet
from kvatlas.bus.subjects import partition_of
from kvatlas.errors import AccessDenied, InvalidValue, KvatlasError, Unreachable
from kvatlas.fleet.identities import Identities
from kvatlas.fleet.records import LEFT_OUT, EngineEndpoint, FleetRecord, Heartbeat, Liveness
from kvatlas.fleet_store.departures import Departure
from kvatlas.fleet_store.fleet_identity import read_store_identity
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.fleet_store.startup_failures import read_trouble
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.layout import Layout
from kvatlas.predictions.store import StoredReport, read_stored_reports
from kvatlas.store.access import RedisAccess
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.doctor import clocks, indexers, pools, routers, service_answer, sidecars, store_facts, stream, workers
from kvatlas_cli.doctor import store as store_checks
from kvatlas_cli.doctor.certificates import judge_certificates, own_certificates
from kvatlas_cli.doctor.finding import Finding, Level, join_names
from kvatlas_cli.doctor.fleets import judge_fleet
from kvatlas_cli.doctor.hashing import judge_hashing
from kvatlas_cli.doctor.heartbeats import HeartbeatListener, Told

LONGEST_S = 9.0
"""Maximum duration of an examination, whatever hangs, unless `wait` is set."""
MOST_CALLS = 60
"""Maximum number of sequential calls to the store."""
SETTLE_S = 6.0
"""Longest wait for states that settle on their own during a rolling update. An indexer takes over a partition within 5
s."""
_POLL_S = 0.2
START = "indexers.start"
_RETRIED = "once this is fixed, the indexers start automatically"
_CAUSES = (START, "nats.reachable", "store.reachable")
_FOLLOWS = ("nats.stream", "nats.other", "indexers.members", "indexers.leases", "workers.index", "workers.settings")
"""Checks that fail merely because no indexer could start."""
_WITHOUT_NATS = ("indexers.members", "indexers.leases", "workers.heartbeats")
"""Checks that fail without NATS: indexers then lose their leases and no longer hear workers."""
_MAX_ROUND_TRIP_US = 200_000
"""The store's clock is not compared if reading it took longer than this."""


class _Order(NamedTuple):
    """How to examine. `ends_s`: deadline, on the monotonic clock."""

    identities: Identities | None
    listen_s: float
    settle_s: float
    ends_s: float
    wait: bool
    on_wait: Told | None
    on_step: Told
    expected: Mapping[str, str] = {}


class _Bus(NamedTuple):
    """NATS during the examination. `stream=None`: there is no event stream. `answers`: JetStream is answering."""

    client: Client
    name: str
    listener: HeartbeatListener
    stream: StreamInfo | None
    answers: bool
    fleet: str | None = None
    other_fleets: Mapping[str, Sequence[str]] = {}


class _Fleet(NamedTuple):
    """The store's view of the fleet at one time. `index_records=None`: the index can't be read."""

    members: list[str]
    leases: dict[int, str]
    records: dict[str, FleetRecord]
    index_records: dict[str, WorkerRecord] | None
    behind: set[str]

    def unsettled(self, partitions: int, heard: Mapping[str, Heartbeat]) -> list[str]:
        """States that may last only seconds, while indexers, publishers or engines are being replaced."""
        if not self.members:
            return []
        found = []
        if free := partitions - len(self.leases):
            found.append(f"an owner of {free} partitions")
        new = {id for id in heard if id not in self.records}
        lost = {id for id in heard if id in self.records and self.records[id].liveness is Liveness.LOST}
        behind = {id for id in self.behind if not heard[id].diagnoses}
        if late := new | lost | behind:
            found.append(f"the index to catch up with {join_names(late)}")
        return found


async def examine(
    nats: NatsAccess | str,
    redis: RedisAccess | str,
    *,
    identities: Identities | None = None,
    listen_s: float,
    settle_s: float = SETTLE_S,
    status_urls: Sequence[str] = (),
    expected: Mapping[str, str] | None = None,
    wait: bool = False,
    on_wait: Told | None = None,
    on_step: Told = lambda _: None,
) -> list[Finding]:
    """Run all possible checks. The first findings say whether requests are served; those about the store come next.

    `status_urls`: publishers' status pages. `expected`: workers that should exist, each with a remark or ''. Listens to
    heartbeats for `listen_s`, and waits up to `settle_s` for states that may settle on their own. Without `wait`, a server
    that does not answer is a finding, and the examination takes at most LONGEST_S, or `listen_s` if that is longer, plus
    MOST_CALLS round trips if the store is far away.
    """
    ends_s = time.monotonic() + max(LONGEST_S, listen_s)
    order = _Order(identities, listen_s, settle_s, ends_s, wait, on_wait, on_step, expected or {})
    found: list[Finding] = []
    nats = NatsAccess(nats) if isinstance(nats, str) else nats
    on_step(f"connecting to {nats.name}")
    client = await _connect_nats(nats, found, wait, on_wait)
    try:
        bus = None if client is None else await _listen(client, nats.name, found, order)
        if status_urls:
            on_step(f"asking {len(status_urls)} status pages")
            heard = bus.listener.heard if bus is not None else {}
            found += sidecars.judge_status_pages(await sidecars.read_status_pages(status_urls), heard, nats.name)
        found += judge_certificates("this command", own_certificates(nats, redis))
        found.append(judge_hashing(compiled=is_compiled()))
        of_store: list[Finding] = []
        with anyio.move_on_after(None if wait else max(1.0, order.ends_s - time.monotonic())) as limit:
            await _examine_store(redis, of_store, bus, order, limit)
        if limit.cancelled_caught:
            line = "the store answers too slowly: not everything was examined"
            of_store.append(Finding("store.reachable", Level.ERROR, line, "check its load and SLOWLOG GET"))
        found = [*(one for one in of_store if one.check.startswith("store.")), *found]
        found += [one for one in of_store if not one.check.startswith("store.")]
    finally:
        if client is not None:
            await client.close()
    return _answer_first(found, heard_up=bus is not None and bus.listener.hears_up)


def _answer_first(found: Sequence[Finding], *, heard_up: bool) -> list[Finding]:
    """The findings, starting with whether requests are served. Errors that merely follow from NATS being down, or from
    indexers that report why they can't start, are dropped. `heard_up`: an engine that is up has been heard."""
    if any(one.check == START for one in found):
        found = _drop_errors(found, _FOLLOWS)
    if any(one.check == "nats.reachable" and one.level is Level.ERROR for one in found):
        found = _drop_errors(found, _WITHOUT_NATS)
    answers = [one for one in found if one.check == service_answer.CHECK]
    if not answers:
        errors = [one for one in found if one.level is Level.ERROR]
        errors.sort(key=lambda one: one.check not in _CAUSES)
        first = errors[0].line if errors else "no worker is known"
        without_store = heard_up and bool(errors) and errors[0].check == "store.reachable"
        answers = [service_answer.judge_unknown(first, without_store=without_store)]
    return [*answers, *(one for one in found if one.check != service_answer.CHECK)]


def _drop_errors(found: Sequence[Finding], checks: Sequence[str]) -> list[Finding]:
    return [one for one in found if one.check not in checks or one.level is not Level.ERROR]


async def _connect_nats(nats: NatsAccess, found: list[Finding], wait: bool, on_wait: Told | None) -> Client | None:
    try:
        client = await connect_nats(nats, name="kvatlas-doctor", wait=wait, on_wait=on_wait)
    except Unreachable as error:
        found.append(Finding("nats.reachable", Level.ERROR, str(error), _cure_of(error, "--nats-url")))
        return None
    found.append(Finding("nats.reachable", Level.OK, f"{nats.name} answers"))
    return client


def _cure_of(error: Unreachable, flag: str) -> str:
    if "certificate" in str(error):
        return "processes connect automatically once the server has a valid certificate"
    if isinstance(error, AccessDenied):
        return f"check the credentials, and {flag}"
    return f"is it running, at this {flag}?"


async def _listen(client: Client, name: str, found: list[Finding], order: _Order) -> _Bus:
    listener = HeartbeatListener()
    subscription = await listener.start(client)
    order.on_step(f"listening to heartbeats for {order.listen_s:g} s")
    began_s, info, answers, fleet = time.monotonic(), None, True, None
    try:
        found += await stream.examine_stream(client)
        info = await stream.read_identity(client)
        fleet = await stream_fleet(client)
        found += stream.judge_refused(await stream.read_dead_letters(client), _now_us())
    except (NatsError, TimeoutError, Unreachable) as error:
        answers = False
        line = f"JetStream does not answer: {str(error) or type(error).__name__}"
        found.append(Finding("nats.jetstream", Level.ERROR, line, "see the log of NATS"))
    await anyio.sleep(max(0.0, began_s + order.listen_s - time.monotonic()))
    await subscription.unsubscribe()  # the next heartbeat of a busy worker would be ahead of the index as read here
    return _Bus(client, name, listener, info, answers, fleet, listener.drop_other_fleets(fleet))


async def _examine_store(
    redis: RedisAccess | str, found: list[Finding], bus: _Bus | None, order: _Order, limit: anyio.CancelScope
) -> None:
    order.on_step("reading the store")
    try:
        store = await open_store(redis, wait=order.wait, on_wait=order.on_wait)
    except Unreachable as error:
        found.append(Finding("store.reachable", Level.ERROR, str(error), _cure_of(error, "--redis-url")))
        return
    try:
        found.append(Finding("store.reachable", Level.OK, f"{store.name} answers"))
        round_trip_ms = await store_facts.measure_round_trip(store)
        found.append(store_checks.judge_distance(round_trip_ms))
        limit.deadline += MOST_CALLS * round_trip_ms / 1e3
        servers = await store_facts.read_servers(store)
        found += store_checks.judge_servers(servers, store_checks.own_libraries())
        layout_finding, layout = await store_checks.examine_layout(store)
        found.append(layout_finding)
        if layout is not None:
            found += await _examine_fleet(store, layout, bus, order)
        elif bus is not None and bus.listener.heard:
            line = (
                f"workers send heartbeats, but no indexer has written into this store: {join_names(bus.listener.heard)}"
            )
            found.append(Finding("workers.heartbeats", Level.ERROR, line, "is this the indexers' --redis-url?"))
        if order.identities is not None and bus is not None:
            found += workers.judge_identities(bus.listener.heard.values(), order.identities)
    except (Unreachable, RedisError) as error:
        found.append(Finding("store.reachable", Level.ERROR, str(error), "see the store's log"))
    finally:
        await store.close()


async def _examine_fleet(store: Store, layout: Layout, bus: _Bus | None, order: _Order) -> list[Finding]:
    began_us = _now_us()
    store_us = await store_time_us(store)
    store_ahead_us = store_us - _now_us() if _now_us() - began_us < _MAX_ROUND_TRIP_US else None
    heard = bus.listener.heard if bus is not None else None
    try:
        index = await open_redis_index(store, writer=False)
    except KvatlasError:
        index = None  # the functions' finding reports it
    try:
        settle_s = min(order.settle_s, order.ends_s - time.monotonic() - 1.0)
        fleet = await _read_settled(store, index, layout.partitions, heard or {}, settle_s, order.on_step)
    except InvalidValue as error:
        return [Finding("workers", Level.ERROR, str(error), "use the same version of kvatlas everywhere")]
    trouble = await read_trouble(store, store_us)
    found = [Finding(START, Level.ERROR, line, _RETRIED) for line in dict.fromkeys(trouble.values())]
    if not trouble or fleet.members:
        found += indexers.judge_indexers(fleet.members, fleet.leases, layout.partitions)
    if bus is not None and bus.answers and index is not None and fleet.members:
        position = await index.position(min(fleet.leases, default=0))
        found += stream.judge_identity(bus.name, bus.stream, position)
    found += workers.judge_workers(
        fleet.records,
        fleet.index_records,
        heard,
        nats=bus.name if bus is not None else "",
        behind=fleet.behind,
        listened_s=order.listen_s,
        now_us=_now_us(),
    )
    departures = await FleetStore(store).departures(store_us)
    found += workers.judge_missing({*fleet.records, *(heard or ())}, departures, order.expected, store_us)
    if bus is not None:
        found += workers.judge_duplicates(bus.listener.heard, bus.listener.yielded)
        found += judge_fleet(await read_store_identity(store), bus.fleet, bus.name, store.name, bus.other_fleets)
    if bus is not None and bus.listener.malformed:
        line = f"a heartbeat can't be decoded: {bus.listener.malformed}"
        found.append(Finding("workers.heartbeats", Level.ERROR, line, "use the same version of kvatlas everywhere"))
    stored = await _read_routers(store, fleet.records)
    found += _examine_pools(fleet.records, heard or {}, stored)
    conditions = {id: one for reports in stored.values() for id, one in routers.conditions_of(reports).items()}
    found += routers.judge_conditions(conditions)
    found += _judge_served(fleet, bus, layout.partitions, stored, departures)
    owners = {
        id: fleet.leases[partition]
        for id in fleet.records
        if (partition := partition_of(id, layout.partitions)) in fleet.leases
    }
    workers_ahead_us = bus.listener.ahead_us if bus is not None else {}
    found += clocks.judge_clocks(
        store_ahead_us,
        workers_ahead_us,
        clocks.indexers_ahead(fleet.records, heard or {}, owners, _now_us()),
        {
            id: us
            for reports in stored.values()
            for id, us in routers.router_clocks(reports, store_ahead_us or 0).items()
        },
    )
    return found


async def _read_routers(store: Store, records: Mapping[str, FleetRecord]) -> dict[str, dict[str, StoredReport]]:
    now_us = await store_time_us(store)
    pool_ids = dict.fromkeys(record.endpoint.pool_id for record in records.values())
    return {pool_id: await read_stored_reports(store, pool_id, now_us) for pool_id in pool_ids}


def _judge_served(
    fleet: _Fleet,
    bus: _Bus | None,
    partitions: int,
    stored: Mapping[str, Mapping[str, StoredReport]],
    departures: Mapping[str, Departure],
) -> Iterator[Finding]:
    """Judge, for each pool, whether a request would be served well now."""
    records = fleet.records
    heard = bus.listener.heard if bus is not None else None
    unusable = {id: service_answer.SILENT for id in records if heard is not None and id not in heard}
    for reports in stored.values():
        for one in reports.values():
            unusable |= dict.fromkeys(one.report.stalled, "its engine makes no progress")
    unindexed = {id: "it publishes no events" for id, one in records.items() if not one.endpoint.events}
    for id, record in (fleet.index_records or {}).items():
        if record.oom:
            unindexed[id] = "the store is out of memory"
        elif record.bad:
            unindexed[id] = "its blocks wait for a snapshot"
    unindexed |= {id: "the index is behind" for id in fleet.behind if id not in unindexed}
    for id, received in (heard or {}).items():
        if any(one.name == LEFT_OUT for one in received.diagnoses):
            unindexed[id] = "its events are left out"
    obstacles = []
    if not fleet.members:
        obstacles.append(
            "no indexer is running" if bus is not None else "NATS does not answer, and no indexer follows it"
        )
    elif len(fleet.leases) < partitions:
        obstacles.append(f"{partitions - len(fleet.leases)} of {partitions} partitions have no owner")
    if fleet.index_records is None:
        obstacles.append("the store has no functions of the index")
    if bus is not None and not bus.answers:
        obstacles.append("JetStream does not answer")
    if (
        bus is None
        and fleet.members
        and all(one.heard_us < _now_us() - workers.MAX_SILENT_US for one in records.values())
    ):
        obstacles.append("NATS does not answer, and no indexer hears the workers")
    pools = _by_pool(records)
    names = {pool_id: _pool_name(some[0].endpoint) for pool_id, some in pools.items()}
    slow = {
        names[pool_id]: why
        for pool_id, reports in stored.items()
        if (why := routers.describe_slow_store(routers.conditions_of(reports))) is not None
    }
    yield from service_answer.judge_serving(
        {names[pool_id]: some for pool_id, some in pools.items()},
        unusable=unusable,
        unindexed=unindexed,
        obstacles=obstacles,
        slow=slow,
    )
    known = {record.endpoint.model_id for record in records.values()}
    for model_id in sorted({one.model_id for one in departures.values()} - known):
        ids = [id for id, one in departures.items() if one.model_id == model_id]
        yield service_answer.judge_gone(f"model {model_id}", ids)


def _examine_pools(
    fleet: Mapping[str, FleetRecord],
    heard: Mapping[str, Heartbeat],
    stored: Mapping[str, Mapping[str, StoredReport]],
) -> list[Finding]:
    by_pool = _by_pool(fleet)
    names = {pool_id: _pool_name(records[0].endpoint) for pool_id, records in by_pool.items()}
    found = list(pools.judge_pools({names[pool_id]: records for pool_id, records in by_pool.items()}))
    found += pools.judge_served_names(list(heard.values()))
    for pool_id in by_pool:
        reports = {id: one.report for id, one in stored[pool_id].items()}
        found += routers.judge_answers(names[pool_id], reports)
        found += routers.judge_progress(names[pool_id], reports)
        found += routers.judge_tenants(names[pool_id], reports)
    return found


def _by_pool(fleet: Mapping[str, FleetRecord]) -> dict[str, list[FleetRecord]]:
    by_pool: dict[str, list[FleetRecord]] = {}
    for record in fleet.values():
        by_pool.setdefault(record.endpoint.pool_id, []).append(record)
    return by_pool


async def _read_settled(
    store: Store,
    index: RedisIndex | None,
    partitions: int,
    heard: Mapping[str, Heartbeat],
    settle_s: float,
    on_step: Told,
) -> _Fleet:
    """Read the fleet once it has settled, or after `settle_s`."""
    deadline_s, told = time.monotonic() + settle_s, ""
    while True:
        fleet = await _read_fleet(store, index, heard)
        unsettled = fleet.unsettled(partitions, heard)
        if not unsettled or time.monotonic() >= deadline_s:
            return fleet
        if unsettled[0] != told:
            told = unsettled[0]
            on_step(f"waiting up to {settle_s:.0f} s for {told}")
        await anyio.sleep(_POLL_S)


async def _read_fleet(store: Store, index: RedisIndex | None, heard: Mapping[str, Heartbeat]) -> _Fleet:
    number = index.layout.number if index is not None else 0
    members, leases = await indexers.read_indexers(store, await store_time_us(store), number)
    records = await FleetStore(store).all()
    if index is None:
        return _Fleet(members, leases, records, None, set())
    shards: Sequence[Sequence[WorkerRecord]] = [await index.records(shard) for shard in range(index.shards)]
    of_index = {one.worker_id: one for shard in shards for one in shard}
    behind = {id for id, one in heard.items() if workers.is_behind(one, of_index.get(id))}
    return _Fleet(members, leases, records, of_index, behind)


def _pool_name(endpoint: EngineEndpoint) -> str:
    own = endpoint.tokenizer_id != endpoint.model_id
    return f"model {endpoint.model_id}" + (f" (tokenizer {endpoint.tokenizer_id})" if own else "")


def _now_us() -> int:
    return time.time_ns() // 1_000
