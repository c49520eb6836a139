"""Copies of the index follow it next to a running indexer, through one replica of the index server and then another."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import grpc
import httpx
import pytest

from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.connection import connect_nats
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import connected_store
from kvatlas_router.queries.grpc_api.index_pb2 import Change, FollowRequest
from kvatlas_router.queries.grpc_api.server import SERVICE
from kvatlas_router.tenancy.proof import hash_of
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher
from tests.indexer.running_replica import answering_requests, running_replica
from tests.router.proxy.engines import MODEL
from tests.router.queries.changes.copy_of_index import MARK, Block, CopyOfIndex
from tests.router.queries.servers import running_index_server

pytestmark = pytest.mark.anyio

ACME, LORA, GLOBEX = (Scope(MODEL, MODEL, *rest) for rest in ((None, "acme"), ("lora", "acme"), (None, "globex")))
CHAIN = extend_chain(range(400), 4)
KEYS = [CHAIN[at : at + HASH_BYTES] for at in range(0, len(CHAIN), HASH_BYTES)]
AUTH = {"Authorization": "Bearer key-a"}


async def of_acme(index: RedisIndex) -> dict[str, set[Block]]:
    """Each worker's blocks of the tenant, according to the index."""
    found: dict[str, set[Block]] = {}
    async for one in index.snapshot():
        if one.scope.tenant_id == "acme":
            block = "acme", one.scope.adapter_id, hash_text(one.sequence_hash), one.tier.label
            found.setdefault(one.worker_id, set()).add(block)
    return found


@asynccontextmanager
async def following(client: httpx.AsyncClient, copy: CopyOfIndex) -> AsyncIterator[None]:
    """Let the copy follow the server while the block runs."""

    async def follow() -> None:
        headers = {**AUTH, **({"Last-Event-ID": copy.position} if copy.position else {})}
        async with client.stream("GET", "/kvatlas/changes", headers=headers, timeout=60) as answer:
            assert answer.status_code == 200, await answer.aread()
            event = {"id": ""}
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if line and name:
                    event[name] = value
                elif "data" in event:
                    copy.take(event["event"], json.loads(event["data"]), event["id"])
                    event = {"id": ""}

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        yield
        tasks.cancel_scope.cancel()


async def test_a_copy_is_the_index_for_its_tenant_and_goes_on_at_another_replica(tmp_path: Path) -> None:
    clients = tmp_path / "clients.toml"
    clients.write_text(f'[clients.a]\nkeys = ["{hash_of(b"key-a")}"]\ntenants = ["acme"]\n')
    async with (
        nats_server() as nats,
        valkey_server() as valkey,
        running_replica(nats.url, valkey.url, stream_storage="file"),
        connected_store(valkey.url, wait=False) as store,
    ):
        bus = await connect_nats(nats.url, name="test", wait=False)
        index = await open_redis_index(store, writer=True)
        one, other, foreign, hybrid = workers = [
            BusPublisher(bus, name) for name in ("one", "other", "foreign", "hybrid")
        ]
        hybrid.dropped = 1
        hybrid.places = {key: (KEYS[at - at % 64], at % 64) for at, key in enumerate(KEYS)}
        copy = CopyOfIndex()

        async def equals() -> bool:
            expected = await of_acme(index)
            if hybrid.marks:
                expected["hybrid"] |= {
                    ("acme", None, hash_text(unpack_hashes(key)[0]), MARK) for _, key in hybrid.marks
                }
                return copy.live and copy.contents() == expected and copy.workers["hybrid"].dropped == 1
            return copy.live and copy.contents() == expected

        given = {"nats_url": nats.url, "clients_file": clients, "control_port": 0, "grpc_port": 0}
        async with (
            answering_requests(bus, workers),
            running_index_server(valkey.url, **given) as (first, grpc_port),
            running_index_server(valkey.url, **given) as (second, _),
        ):
            for worker in workers:
                await worker.start()
            await foreign.send(foreign.store(GLOBEX, CHAIN))
            await one.send(one.store(ACME, CHAIN[: 8 * 70]))
            await one.send(one.store(GLOBEX, CHAIN))
            await hybrid.send(hybrid.store(ACME, CHAIN[: 8 * 70]))
            await hybrid.send(hybrid.mark(ACME, [KEYS[3], KEYS[66]]))

            async def is_there() -> bool:
                held = await of_acme(index)
                return len(held.get("one", ())) == len(held.get("hybrid", ())) == 70

            await until(is_there, what="the index has it")
            async with following(first, copy):
                await until(equals, what="the snapshot")
                await one.send(one.store(ACME, CHAIN[8 * 70 :], parent=KEYS[69]))
                await one.send(one.remove(ACME, CHAIN[8 * 90 :]))
                await other.send(other.store(LORA, CHAIN[: 8 * 5], Tier.CPU_DRAM))
                await hybrid.send(hybrid.mark(ACME, [KEYS[10]]))
                await hybrid.send(hybrid.mark(ACME, [KEYS[66]], unmark=True))
                await until(equals, what="changes")
            await one.send(one.store(LORA, CHAIN[: 8 * 9]))  # there is no follower
            await other.start(other.incarnation + 1)
            await other.send(other.store(ACME, CHAIN[: 8 * 3]))
            async with following(second, copy):
                await until(equals, what="what was missed")
                await one.send(one.clear())
                await until(equals, what="a cleared worker")
                await one.start(one.incarnation + 1)
                await one.send(one.store(ACME, CHAIN[: 8 * 2]))
                await until(equals, what="a new incarnation")
                await index.retire("other", other.incarnation)
                await until(equals, what="a worker that the index has closed")
                await hybrid.start(hybrid.incarnation + 1)
                await until(equals, what="a new incarnation with marks")
            assert "foreign" not in copy.workers and all(
                block[0] == "acme" for worker in copy.workers.values() for block in worker.held
            )
            lost = await first.get("/kvatlas/changes", headers=AUTH, params={"after": "1-1"})
            assert lost.status_code == 410
            wrong = await first.get("/kvatlas/changes", headers=AUTH, params={"after": "yesterday"})
            assert wrong.status_code == 400
            assert (await first.get("/kvatlas/changes")).status_code == 401
            by_grpc = CopyOfIndex()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                call = channel.unary_stream(
                    f"/{SERVICE}/Follow",
                    request_serializer=FollowRequest.SerializeToString,
                    response_deserializer=Change.FromString,
                )
                async for change in call(FollowRequest(), metadata=(("authorization", "Bearer key-a"),), timeout=60):
                    by_grpc.take(change.kind, json.loads(change.data), change.position)
                    if by_grpc.contents() == copy.contents():
                        break
            assert by_grpc.contents() == copy.contents()
        await bus.close()
