"""The whole examination: asks NATS, the store and the workers, and gives every finding in order."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from redis.exceptions import RedisError

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import ALL_ALIVE
from kvatlas.errors import InvalidValue, KvatlasError, Unreachable
from kvatlas.fleet.records import EngineEndpoint, FleetRecord, Heartbeat
from kvatlas.fleet.store import FleetStore
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import open_redis_index
from kvatlas.predictions.store import told_answers
from kvatlas.redaction import redact_password
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.doctor import clocks, indexers, routers, store_facts, workers
from kvatlas_cli.doctor import store as store_checks
from kvatlas_cli.doctor import stream as bus
from kvatlas_cli.doctor.finding import Finding, Level

CATCH_UP_S = 2.0
"""How long the index may take to reach what a worker told."""
_POLL_S = 0.1
_MOST_ROUND_TRIP_US = 200_000
"""A time that took longer to come is not compared."""


@dataclass(slots=True)
class _Listening:
    """Heartbeats, the last of each worker, and how far each clock is ahead by the message that was the least late."""

    heard: dict[str, workers.Heard] = field(default_factory=dict)
    ahead_us: dict[str, int] = field(default_factory=dict)
    malformed: str = ""

    async def on_beat(self, msg: Msg) -> None:
        try:
            beat = Heartbeat.unpack(msg.data)
        except InvalidValue as error:
            self.malformed = f"{msg.subject}: {error}"
            return
        now_us = _now_us()
        self.heard[beat.worker_id] = workers.Heard(beat, now_us)
        if beat.sent_us:
            ahead = beat.sent_us - now_us
            self.ahead_us[beat.worker_id] = max(ahead, self.ahead_us.get(beat.worker_id, ahead))


async def examine(
    nats_url: str,
    redis_url: str,
    *,
    listen_s: float,
    wait: bool = False,
    on_wait: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Every check that can be made, the store's first.

    Without `wait` a server that does not answer is a finding. Else nothing is waited for but `listen_s` of heartbeats, and
    a moment for the index to catch up.
    """
    found: list[Finding] = []
    client = await _connected(nats_url, found, wait, on_wait)
    try:
        listening = await _listen(client, listen_s) if client is not None else None
        try:
            store = await open_store(redis_url, wait=wait, on_wait=on_wait)
        except Unreachable as error:
            found.insert(0, Finding("store.reachable", Level.ERROR, str(error), "is it running, at this --redis-url?"))
        else:
            try:
                found[:0] = await _store(store)
                found += await _fleet(store, listening, listen_s)
            except (Unreachable, RedisError) as error:
                found.append(Finding("store.reachable", Level.ERROR, str(error), "see the store's log"))
            finally:
                await store.close()
    finally:
        if client is not None:
            await client.close()
    return found


async def _connected(
    nats_url: str, found: list[Finding], wait: bool, on_wait: Callable[[str], None] | None
) -> Client | None:
    try:
        client = await connect_nats(nats_url, name="kvatlas-doctor", wait=wait, on_wait=on_wait)
    except Unreachable as error:
        found.append(Finding("nats.reachable", Level.ERROR, str(error), "is it running, at this --nats-url?"))
        return None
    found.append(Finding("nats.reachable", Level.OK, f"NATS at {redact_password(nats_url)} answers"))
    try:
        found += await bus.stream(client)
    except (NatsError, TimeoutError) as error:
        line = f"JetStream does not answer: {error or type(error).__name__}"
        found.append(Finding("nats.jetstream", Level.ERROR, line, "see the log of NATS"))
    return client


async def _listen(client: Client, listen_s: float) -> _Listening:
    listening = _Listening()
    subscription = await client.subscribe(ALL_ALIVE, cb=listening.on_beat)
    await anyio.sleep(listen_s)
    await subscription.unsubscribe()
    return listening


async def _store(store: Store) -> list[Finding]:
    found = [Finding("store.reachable", Level.OK, f"{store.name} answers")]
    servers = await store_facts.read_servers(store)
    found += store_checks.judge_servers(servers, store_checks.own_libraries())
    return found


async def _fleet(store: Store, listening: _Listening | None, listened_s: float) -> list[Finding]:
    laid_out, sizes = await store_checks.layout(store)
    found = [laid_out]
    if sizes is None:
        return found
    began_us = _now_us()
    store_us = await store_facts.read_time(store)
    ahead_us = store_us - _now_us() if _now_us() - began_us < _MOST_ROUND_TRIP_US else None
    members, leases = await indexers.read_indexers(store, store_us)
    found += indexers.judge_indexers(members, leases, sizes[0])
    try:
        fleet = await FleetStore(store).all()
    except InvalidValue as error:
        found.append(Finding("workers", Level.ERROR, str(error), "run one version of kvatlas on one store"))
        return found
    heard = listening.heard if listening is not None else None
    fences, behind = await _fences(store, listening)
    found += workers.judge_workers(fleet, fences, heard, behind=behind, listened_s=listened_s, now_us=_now_us())
    if listening is not None and listening.malformed:
        line = f"a heartbeat can't be understood: {listening.malformed}"
        found.append(Finding("workers.heartbeats", Level.ERROR, line, "run one version of kvatlas"))
    pools: dict[str, list[FleetRecord]] = {}
    for record in fleet.values():
        pools.setdefault(record.endpoint.pool_id, []).append(record)
    named = {pool_id: _pool_name(records[0].endpoint) for pool_id, records in pools.items()}
    found += workers.judge_pools({named[pool_id]: records for pool_id, records in pools.items()})
    for pool_id in pools:
        found += routers.judge_answers(named[pool_id], await told_answers(store, pool_id, store_us))
    ahead = max((record.heard_us - _now_us() for record in fleet.values()), default=0)
    workers_ahead = listening.ahead_us if listening is not None else {}
    found += clocks.judge_clocks(ahead_us, workers_ahead, max(0, ahead))
    return found


async def _fences(store: Store, listening: _Listening | None) -> tuple[dict[str, WorkerRecord] | None, set[str]]:
    """The index's records, and the workers whose record does not reach what they told, in spite of some patience."""
    try:
        index = await open_redis_index(store, writer=False)
    except KvatlasError:
        return None, set()  # the layout's finding says so
    beats = {worker_id: one.beat for worker_id, one in listening.heard.items()} if listening is not None else {}
    deadline = time.monotonic() + CATCH_UP_S
    while True:
        fences = {r.worker_id: r for shard in range(index.shards) for r in await index.records(shard)}
        behind = {id for id, beat in beats.items() if workers.is_behind(beat, fences.get(id))}
        if not behind or time.monotonic() > deadline:
            return fences, behind
        await anyio.sleep(_POLL_S)


def _pool_name(endpoint: EngineEndpoint) -> str:
    own = endpoint.tokenizer_id != endpoint.model_id
    return f"model {endpoint.model_id}" + (f" (tokenizer {endpoint.tokenizer_id})" if own else "")


def _now_us() -> int:
    return time.time_ns() // 1_000
