"""The whole examination: checks NATS, the store and the workers, and returns every finding in order."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import ALL_ALIVE
from kvatlas.errors import InvalidValue, KvatlasError, Unreachable
from kvatlas.fleet.identities import Identities
from kvatlas.fleet.records import EngineEndpoint, FleetRecord, Heartbeat
from kvatlas.fleet.store import FleetStore
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import open_redis_index
from kvatlas.predictions.store import read_answer_reports
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.doctor import clocks, indexers, routers, store_facts, workers
from kvatlas_cli.doctor import store as store_checks
from kvatlas_cli.doctor.report import Finding, Level
from kvatlas_cli.doctor.stream import examine_stream

CATCH_UP_S = 2.0
"""Time for the index to catch up with the workers' heartbeats."""
_POLL_S = 0.1
_MAX_ROUND_TRIP_US = 200_000
"""The store's clock is not compared if reading it took longer."""


@dataclass(slots=True)
class _HeartbeatListener:
    """The last heartbeat of each worker, and how far each clock is ahead by the heartbeat that was delayed least."""

    heard: dict[str, workers.ReceivedHeartbeat] = field(default_factory=dict)
    ahead_us: dict[str, int] = field(default_factory=dict)
    malformed: str = ""

    async def on_heartbeat(self, msg: Msg) -> None:
        try:
            heartbeat = Heartbeat.unpack(msg.data)
        except InvalidValue as error:
            self.malformed = f"{msg.subject}: {error}"
            return
        if not heartbeat.worker_id == heartbeat.endpoint.id == msg.subject.rpartition(".")[2]:
            self.malformed = (
                f"{msg.subject}: heartbeat of worker {heartbeat.worker_id}, endpoint {heartbeat.endpoint.id}"
            )
            return
        now_us = _now_us()
        self.heard[heartbeat.worker_id] = workers.ReceivedHeartbeat(heartbeat, now_us)
        if heartbeat.sent_us:
            ahead_us = heartbeat.sent_us - now_us
            self.ahead_us[heartbeat.worker_id] = max(ahead_us, self.ahead_us.get(heartbeat.worker_id, ahead_us))


async def examine(
    nats: NatsAccess | str,
    redis: RedisAccess | str,
    *,
    identities: Identities | None = None,
    listen_s: float,
    wait: bool = False,
    on_wait: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Run every check that is possible; the store's findings come first.

    Without `wait` a server that does not answer is a finding. It waits for `listen_s` of heartbeats and at most CATCH_UP_S
    for the index to catch up, otherwise for nothing.
    """
    found: list[Finding] = []
    nats = NatsAccess(nats) if isinstance(nats, str) else nats
    client = await _connect_nats(nats, found, wait, on_wait)
    try:
        listener = await _listen(client, listen_s) if client is not None else None
        try:
            store = await open_store(redis, wait=wait, on_wait=on_wait)
        except Unreachable as error:
            found.insert(0, Finding("store.reachable", Level.ERROR, str(error), "is it running, at this --redis-url?"))
        else:
            try:
                found[:0] = await _examine_store(store)
                found += await _examine_fleet(store, listener, listen_s)
                if identities is not None and listener is not None:
                    found += workers.judge_identities(listener.heard.values(), identities)
            except (Unreachable, RedisError) as error:
                found.append(Finding("store.reachable", Level.ERROR, str(error), "see the store's log"))
            finally:
                await store.close()
    finally:
        if client is not None:
            await client.close()
    return found


async def _connect_nats(
    nats: NatsAccess, found: list[Finding], wait: bool, on_wait: Callable[[str], None] | None
) -> Client | None:
    try:
        client = await connect_nats(nats, name="kvatlas-doctor", wait=wait, on_wait=on_wait)
    except Unreachable as error:
        found.append(Finding("nats.reachable", Level.ERROR, str(error), "is it running, at this --nats-url?"))
        return None
    found.append(Finding("nats.reachable", Level.OK, f"{nats.name} answers"))
    try:
        found += await examine_stream(client)
    except (NatsError, TimeoutError) as error:
        line = f"JetStream does not answer: {error or type(error).__name__}"
        found.append(Finding("nats.jetstream", Level.ERROR, line, "see the log of NATS"))
    return client


async def _listen(client: Client, listen_s: float) -> _HeartbeatListener:
    listener = _HeartbeatListener()
    subscription = await client.subscribe(ALL_ALIVE, cb=listener.on_heartbeat)
    await anyio.sleep(listen_s)
    await subscription.unsubscribe()
    return listener


async def _examine_store(store: Store) -> list[Finding]:
    found = [Finding("store.reachable", Level.OK, f"{store.name} answers")]
    servers = await store_facts.read_servers(store)
    found += store_checks.judge_servers(servers, store_checks.own_libraries())
    return found


async def _examine_fleet(store: Store, listener: _HeartbeatListener | None, listened_s: float) -> list[Finding]:
    layout_finding, layout = await store_checks.examine_layout(store)
    found = [layout_finding]
    if layout is None:
        return found
    began_us = _now_us()
    store_us = await store_facts.read_time(store)
    store_ahead_us = store_us - _now_us() if _now_us() - began_us < _MAX_ROUND_TRIP_US else None
    members, leases = await indexers.read_indexers(store, store_us)
    found += indexers.judge_indexers(members, leases, layout[0])
    try:
        fleet = await FleetStore(store).all()
    except InvalidValue as error:
        found.append(Finding("workers", Level.ERROR, str(error), "use the same version of kvatlas everywhere"))
        return found
    heard = listener.heard if listener is not None else None
    index_records, behind = await _read_index_records(store, listener)
    found += workers.judge_workers(fleet, index_records, heard, behind=behind, listened_s=listened_s, now_us=_now_us())
    if listener is not None and listener.malformed:
        line = f"a heartbeat can't be decoded: {listener.malformed}"
        found.append(Finding("workers.heartbeats", Level.ERROR, line, "use the same version of kvatlas everywhere"))
    pools: dict[str, list[FleetRecord]] = {}
    for record in fleet.values():
        pools.setdefault(record.endpoint.pool_id, []).append(record)
    names = {pool_id: _pool_name(records[0].endpoint) for pool_id, records in pools.items()}
    found += workers.judge_pools({names[pool_id]: records for pool_id, records in pools.items()})
    for pool_id in pools:
        found += routers.judge_answers(names[pool_id], await read_answer_reports(store, pool_id, store_us))
    indexers_ahead_us = max((record.heard_us - _now_us() for record in fleet.values()), default=0)
    workers_ahead_us = listener.ahead_us if listener is not None else {}
    found += clocks.judge_clocks(store_ahead_us, workers_ahead_us, max(0, indexers_ahead_us))
    return found


async def _read_index_records(
    store: Store, listener: _HeartbeatListener | None
) -> tuple[dict[str, WorkerRecord] | None, set[str]]:
    """The index's worker records, and the workers with which the index has not caught up after CATCH_UP_S."""
    try:
        index = await open_redis_index(store, writer=False)
    except KvatlasError:
        return None, set()  # reported by the layout's finding
    heard = listener.heard if listener is not None else {}
    deadline = time.monotonic() + CATCH_UP_S
    while True:
        records = {one.worker_id: one for shard in range(index.shards) for one in await index.records(shard)}
        behind = {id for id, one in heard.items() if workers.is_behind(one.heartbeat, records.get(id))}
        if not behind or time.monotonic() > deadline:
            return records, behind
        await anyio.sleep(_POLL_S)


def _pool_name(endpoint: EngineEndpoint) -> str:
    own = endpoint.tokenizer_id != endpoint.model_id
    return f"model {endpoint.model_id}" + (f" (tokenizer {endpoint.tokenizer_id})" if own else "")


def _now_us() -> int:
    return time.time_ns() // 1_000
