"""The values thrown at each border: each function throws once, and returns the number of things thrown."""

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Any

import anyio
import httpx
from nats.errors import Error as NatsError
from redis.exceptions import ResponseError

from kvatlas.bus.control import ControlOp
from kvatlas.bus.subjects import alive_subject, control_subject, events_subject, partition_of
from kvatlas.ejection.store import ejections_key
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Heartbeat, Liveness, WorkerState
from kvatlas.fleet_store.fleet_store import pool_workers_key
from kvatlas.identity import Scope, shard_of
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.predictions.store import answers_key
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.settings import IndexerSettings, ProxySettings, PublishSettings
from kvatlas_publishers.engines.metrics import _SGLANG, _VLLM
from tests.chaos.fleet import MODEL, PARTITIONS, SHARDS
from tests.fuzz.targets import HOSTILE, Targets
from tests.fuzz.values import NUMBERS, TEXTS, any_value, mutated, pack, packed
from tests.http_client import http_client

SCOPE = Scope(MODEL, MODEL)
STRANGERS = [f"stranger-{number}" for number in range(4)]
"""Workers that only the fuzzer speaks for."""

Border = Callable[[Targets, Random], Awaitable[int]]


def _event(rng: Random) -> dict[str, Any]:
    names = [rng.randrange(1 << 64) for _ in range(rng.choice([1, 3]))]
    stored = {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": None,
        "token_ids": [rng.randrange(50_000) for _ in range(16 * len(names))],
        "block_size": 16,
        "lora_name": None,
        "medium": rng.choice(["GPU", "CPU"]),
        "extra_keys": [["salt"] for _ in names],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    removed = {"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}
    return rng.choice([stored, stored, removed, {"type": "AllBlocksCleared"}])


async def engine_payloads(targets: Targets, rng: Random) -> int:
    engine = targets.engine
    for _ in range(20):
        payload = packed(rng, [time.time(), [_event(rng) for _ in range(rng.choice([0, 1, 4]))], None])
        if rng.random() < 0.8:
            await engine.send(payload)
        else:
            seq = rng.choice(NUMBERS[:-8])
            frames = [b"", (int(seq) & ((1 << 64) - 1)).to_bytes(8, "big"), payload, b"more"]
            await engine.raw(*frames[: rng.randrange(1, 5)])
    return 20


async def metrics_pages(targets: Targets, rng: Random) -> int:
    lines = []
    for name in rng.sample(sorted(_VLLM.all | _SGLANG.all), 8):
        value = rng.choice([*NUMBERS, "+Inf", "1e300", "", "x", "9" * 400])
        label = str(rng.choice([*NUMBERS, *TEXTS[:3], "9" * 5_000])).replace('"', "")
        lines.append(f'{name}{{num_gpu_blocks="{label}",block_size="{label}",engine="0"}} {value}')
    page = "\n".join(lines) + rng.choice(["\n", "", "\n{", "\x00"])
    health = rng.choice([200, 200, 200, 204, 404, 500])
    targets.pages.pages = {"/health": (health, ""), "/metrics": (rng.choice([200, 200, 200, 500]), page)}
    return 1


def heartbeat_of(worker_id: str) -> dict[str, Any]:
    endpoint = EngineEndpoint(
        id=worker_id,
        kind=EngineKind.VLLM,
        base_url="http://127.0.0.1:9",
        model_id=MODEL,
        tokenizer_id=MODEL,
        block_size=16,
    )
    beat = Heartbeat(
        worker_id=worker_id,
        incarnation=time.time_ns() // 1_000_000 << 20,
        acked_seq=5,
        state=EngineState.DOWN,
        endpoint=endpoint,
        load=WorkerState(id=worker_id),
        sent_us=1,
    )
    return beat.model_dump(mode="json", exclude_none=True)


async def heartbeats(targets: Targets, rng: Random) -> int:
    client = targets.fleet.nats_client
    for _ in range(20):
        worker_id = rng.choice(STRANGERS)
        await client.publish(alive_subject(worker_id), packed(rng, heartbeat_of(worker_id)))
    for worker in targets.fleet.workers:  # in the name of an existing worker, but impossible
        beat = {**heartbeat_of(worker.worker_id), "incarnation": (1 << 64) - 1 - rng.randrange(1 << 50)}
        await client.publish(alive_subject(worker.worker_id), pack(beat))
    return 20 + len(targets.fleet.workers)


def message_of(rng: Random, worker_id: str) -> list[Any]:
    scopes = {SCOPE.scope_id: [MODEL, MODEL, None, "default", 16, 0]}
    hashes = rng.randbytes(8 * rng.choice([1, 16]))
    digest = [0] * 15
    events = [
        [1, SCOPE.scope_id, 0, hashes, None, 0, 0],
        [2, SCOPE.scope_id, 0, hashes],
        [3],
        [4],
        [5, SCOPE.scope_id, 0, hashes, None, 0, 0],
        [6, rng.choice([0, 1]), digest],
        [7, digest],
    ]
    seq = rng.choice([0, 0, 1, 2, 3])
    some = [[4], [6, 0, digest]] if not seq else rng.choices(events, k=rng.choice([1, 3]))
    return [1, worker_id, time.time_ns() // 1_000_000 << 20, seq, time.time_ns() // 1_000, scopes, some]


async def messages(targets: Targets, rng: Random) -> int:
    client = targets.fleet.nats_client
    for _ in range(20):
        worker_id = rng.choice(STRANGERS)
        payload = packed(rng, message_of(rng, worker_id)) if rng.random() < 0.8 else pack(message_of(rng, worker_id))
        await client.publish(events_subject(worker_id, PARTITIONS), payload)
    for worker in targets.fleet.workers:  # on the subject of an existing worker, but impossible
        raw = message_of(rng, worker.worker_id)
        raw[2] = (1 << 64) - 1 - rng.randrange(1 << 50)
        await client.publish(events_subject(worker.worker_id, PARTITIONS), pack(raw))
    return 20 + len(targets.fleet.workers)


async def control_requests(targets: Targets, rng: Random) -> int:
    client = targets.fleet.nats_client
    names = [HOSTILE, *(worker.worker_id for worker in targets.fleet.workers)]
    for _ in range(5):
        request = {"op": rng.choice(list(ControlOp)).value, "above": rng.choice(NUMBERS[:-10])}
        payload = packed(rng, request) if rng.random() < 0.7 else pack(request)
        await client.publish(control_subject(rng.choice(names)), payload, reply=client.new_inbox())
    return 5


async def grant_requests(targets: Targets, rng: Random) -> int:
    client = targets.fleet.nats_client
    for _ in range(20):
        worker_id = rng.choice(STRANGERS)
        request = {"worker_id": worker_id, "incarnation": 1, "snapshot_bytes": rng.choice(NUMBERS[:-10])}
        place = rng.choice([str(partition_of(worker_id, PARTITIONS)), *map(str, NUMBERS[:6]), "x"])
        await client.publish(f"kvatlas.grant.{place}.{worker_id}", packed(rng, request), reply=client.new_inbox())
    return 20


async def http_bodies(targets: Targets, rng: Random) -> int:
    hints = {"model_id": MODEL, "token_ids": [1] * 64, "expected_output_tokens": 10, "prompt": "x", "model": MODEL}
    requests = [
        ("POST", "/kvatlas/route"),
        ("POST", "/kvatlas/select"),
        ("POST", "/kvatlas/done"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/status"),
        ("GET", "/v1/models"),
        ("PUT", "/readyz"),
    ]
    async with http_client(timeout=10) as client:
        for _ in range(6):
            method, path = rng.choice(requests)
            body = _json(mutated(rng, mutated(rng, hints))) if rng.random() < 0.8 else rng.randbytes(100)
            url = rng.choice(targets.urls) + path
            headers = {"content-type": rng.choice(["application/json", "text/plain", "x"]), "x-request-id": "a" * 100}
            try:
                answer = await client.request(method, url, content=body, headers=headers)
            except httpx.TimeoutException:
                raise AssertionError(f"{method} {url} is not answered: {body[:300]!r}") from None
            except httpx.HTTPError:
                continue  # it may close a connection
            assert answer.status_code != 500, f"{method} {url} answers 500: {body[:300]!r} {answer.text[:300]}"
    return 6


def _json(value: Any) -> bytes:
    text = json.dumps(value, default=lambda one: one.hex() if isinstance(one, bytes) else str(one))
    return text.encode(errors="replace")


async def settings(targets: Targets, rng: Random) -> int:
    """In this process: a settings class either accepts a value or refuses it with one of our errors."""
    for kind in (PublishSettings, IndexerSettings, ProxySettings):
        given = {"worker_id": "w", "model_id": "m", "engine": "vllm", "endpoint": "tcp://127.0.0.1:1"}
        fields = {name: value for name, value in given.items() if name in kind.model_fields}
        for _ in range(3):
            name = rng.choice(sorted(kind.model_fields))
            value = any_value(rng)
            with suppress(KvatlasError):
                kind.load(**{**fields, name: value})
    return 9


async def redis_contents(targets: Targets, rng: Random) -> int:
    """Records of strangers, in the places where the processes read them."""
    client = targets.fleet.store.client
    worker_id = rng.choice(STRANGERS)
    beat = Heartbeat.model_validate(heartbeat_of(worker_id))
    record = FleetRecord(endpoint=beat.endpoint, state=EngineState.DOWN, liveness=Liveness.LOST).model_dump(mode="json")
    await client.hset(pool_workers_key(SCOPE.pool_id), worker_id, packed(rng, record))
    shard = shard_of(partition_of(worker_id, PARTITIONS), SHARDS)
    fields = [bytes(8), 1, b"", b"", 0, 0, 0, bytes(8), 0, 0, 1]
    await client.hset(ShardKeys(shard).workers, worker_id, packed(rng, fields))
    return 2


async def pool_records(targets: Targets, rng: Random) -> int:
    """In the pool in which the router books: records and members of any form, and keys of another type."""
    client = targets.fleet.store.client
    _, *keys = pool_keys(SCOPE.pool_id)  # the fleet's records are among `redis_contents`
    key = rng.choice([*keys, ejections_key(SCOPE.pool_id), answers_key(SCOPE.pool_id)])
    junk = rng.choice([packed(rng, ["w", "o", 1, 2, 3, 0, 1]), rng.randbytes(rng.choice([0, 8, 119, 120, 130]))])
    with suppress(ResponseError):  # meanwhile it may have become a key of another type
        if rng.random() < 0.05:
            await client.set(key, junk)
        elif await client.type(key) == b"zset":
            await client.zadd(key, {junk: rng.choice([0.0, 1.0, 1e15])})
        else:
            await client.hset(key, rng.choice([*await client.hkeys(key), b"stray"]), junk)
    return 1


BORDERS: dict[str, Border] = {
    one.__name__: one
    for one in (
        engine_payloads,
        metrics_pages,
        heartbeats,
        messages,
        control_requests,
        grant_requests,
        http_bodies,
        settings,
        redis_contents,
        pool_records,
    )
}


async def throw(border: Border, targets: Targets, rng: Random) -> int:
    """Throw once. If the fuzzer's own connection to NATS is lost, try again."""
    for _ in range(3):
        try:
            return await border(targets, rng)
        except NatsError:
            await anyio.sleep(0.5)
    return 0
