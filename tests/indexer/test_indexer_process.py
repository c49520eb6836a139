"""Whole replicas on a real NATS and a real Valkey: which one reads what, and that no message is lost or applied twice."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from subprocess import PIPE

import anyio
import pytest
from anyio.abc import Process
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.control import ControlOp, ControlRequest, GrantReply, GrantRequest
from kvatlas.bus.subjects import control_subject, grant_subject, partition_of
from kvatlas.embedded import EmbeddedServer
from kvatlas.embedded.free_port import free_port
from kvatlas.errors import LayoutMismatch, SettingsError, Unreachable
from kvatlas.fleet.records import Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import Store, connected_store
from kvatlas_indexer.indexer_process import Replica
from kvatlas_indexer.service import IndexerSettings, run_indexer
from tests.eventually import until
from tests.http_client import http_client
from tests.indexer.bus_publisher import PARTITIONS, BusPublisher, has_applied_all, indexed, published

pytestmark = pytest.mark.anyio

TAKEOVER_S = 15.0
"""Three times as long as it should take, because the machine may be busy."""
ALL = list(range(PARTITIONS))


class Servers:
    """The servers that the replicas of one test use."""

    def __init__(self, nats: EmbeddedServer, valkey: EmbeddedServer, fleet: FleetStore) -> None:
        self.nats, self.valkey, self.fleet = nats, valkey, fleet

    def settings(self, member_id: str, **more: object) -> IndexerSettings:
        here = {"nats_url": self.nats.url, "redis_url": self.valkey.url, "status_port": 0, "stream_storage": "memory"}
        return IndexerSettings.load(member_id=member_id, **{**here, **more})

    @asynccontextmanager
    async def replica(self, member_id: str, **more: object) -> AsyncIterator[Replica]:
        """A replica in this process; leaving the context stops it cleanly."""
        started: list[Replica] = []
        async with anyio.create_task_group() as group:
            group.start_soon(run_indexer, self.settings(member_id, **more), started.append)
            await until(lambda: started, what=f"{member_id} is ready")
            yield started[0]
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def process(self, member_id: str) -> AsyncIterator[Process]:
        """A replica in a separate process; leaving the context kills it."""
        command = [sys.executable, "-m", "tests.indexer.replica_process", self.nats.url, self.valkey.url, member_id]
        async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=None) as process:
            assert process.stdout is not None
            try:
                with anyio.fail_after(20):
                    assert b"ready" in await process.stdout.receive()
                yield process
            finally:
                if process.returncode is None:
                    process.kill()

    async def shared(self, *member_ids: str) -> bool:
        """True if these members, and only these, hold all leases, each at least one."""
        leases = await self.fleet.leases()
        return sorted(leases) == ALL and set(leases.values()) == set(member_ids)


@pytest.fixture
def servers(nats: EmbeddedServer, valkey: EmbeddedServer, fleet: FleetStore) -> Servers:
    return Servers(nats, valkey, fleet)


@pytest.fixture
async def index(store: Store) -> RedisIndex:
    """The index as a router sees it."""
    return await open_redis_index(store, partitions=PARTITIONS, shards=1, writer=True)


@asynccontextmanager
async def router(url: str) -> AsyncIterator[RedisIndex]:
    """The index as seen by a process that starts now and only reads."""
    async with connected_store(url, wait=False) as store:
        yield await open_redis_index(store, writer=False)


def reads(replica: Replica) -> list[int]:
    return [status.partition for status in replica.partitions]


def reads_to_the_end(*replicas: Replica) -> bool:
    statuses = [status for replica in replicas for status in replica.partitions]
    return sorted(status.partition for status in statuses) == ALL and all(status.at_end for status in statuses)


async def start_all(workers: list[BusPublisher]) -> None:
    for worker in workers:
        await worker.start()
        await worker.store_more()


async def test_one_replica_reads_everything(servers: Servers, nats_client: Client, index: RedisIndex) -> None:
    workers = [BusPublisher(nats_client, f"w{i}") for i in range(10)]
    async with servers.replica("a") as a:
        await until(lambda: reads_to_the_end(a), what="every partition is read")
        await start_all(workers)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        assert await indexed(index, *workers) == published(*workers)
        assert a.counters.applied == 20
        assert a.ready


async def test_two_replicas_share_the_partitions(servers: Servers, nats_client: Client, index: RedisIndex) -> None:
    workers = [BusPublisher(nats_client, f"w{i}") for i in range(16)]
    async with servers.replica("a") as a, servers.replica("b") as b:
        await until(lambda: servers.shared("a", "b"), what="both hold leases")
        await until(lambda: reads_to_the_end(a, b), what="every partition is read once")
        assert not set(reads(a)) & set(reads(b))
        await start_all(workers)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        assert await indexed(index, *workers) == published(*workers)
        assert a.counters.applied + b.counters.applied == 32
        assert a.counters.duplicates + b.counters.duplicates == 0
        assert a.counters.applied and b.counters.applied


async def test_a_replica_that_stops_releases_its_partitions_at_once(servers: Servers, index: RedisIndex) -> None:
    async with servers.replica("a") as a:
        async with servers.replica("b"):
            await until(lambda: servers.shared("a", "b"), what="both hold leases")
        assert "b" not in (await servers.fleet.leases()).values()
        await until(lambda: reads(a) == ALL, deadline_s=TAKEOVER_S, what="a has them")


async def test_the_partitions_of_a_killed_replica_are_taken_over(
    servers: Servers, nats_client: Client, index: RedisIndex
) -> None:
    workers = [BusPublisher(nats_client, f"w{i}") for i in range(16)]
    async with AsyncExitStack() as stack:
        child = await stack.enter_async_context(servers.process("child"))
        a = await stack.enter_async_context(servers.replica("a"))
        await until(lambda: servers.shared("a", "child"), what="both hold leases")
        await start_all(workers)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        child.kill()
        for worker in workers:
            await worker.store_more()  # half of them go to partitions without a reader
        await until(lambda: reads(a) == ALL, deadline_s=TAKEOVER_S, what="a reads everything")
        for worker in workers:
            await worker.store_more()
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        assert await indexed(index, *workers) == published(*workers)
        assert a.counters.gaps == 0


async def test_two_owners_of_a_partition_change_nothing(
    servers: Servers, nats_client: Client, index: RedisIndex
) -> None:
    """As with a replica that was away and still reads: the fence protects the index, not the leases."""
    worker = BusPublisher(nats_client, "w0")
    async with servers.replica("a") as a, servers.replica("b") as b:
        await until(lambda: reads_to_the_end(a, b), what="every partition is read once")
        partition = partition_of(worker.worker_id, PARTITIONS)
        other = b if partition in reads(a) else a
        other.owned.start([partition])  # without a lease
        await until(lambda: partition in reads(other), what="both read it")
        await start_all([worker])
        for _ in range(20):
            await worker.store_more()
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        assert await indexed(index, worker) == published(worker)
        assert a.counters.applied + b.counters.applied == len(worker.sent)
        assert a.counters.gaps + b.counters.gaps == 0


async def test_without_nats_partitions_are_released(servers: Servers, index: RedisIndex) -> None:
    async with servers.replica("a") as a:
        await until(lambda: reads(a) == ALL, what="a reads everything")
        servers.nats.pause()
        try:
            await until(lambda: reads(a) == [], what="a has released everything")
            assert not a.ready
        finally:
            servers.nats.resume()
        await until(lambda: reads(a) == ALL, what="a reads everything again")


async def test_a_store_that_was_away_loses_nothing(servers: Servers, nats_client: Client, index: RedisIndex) -> None:
    worker = BusPublisher(nats_client, "w0")
    async with servers.replica("a") as a:
        await until(lambda: reads_to_the_end(a), what="every partition is read")
        await start_all([worker])
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        servers.valkey.pause()
        await worker.store_more()
        await worker.store_more()
        servers.valkey.resume()
        await until(lambda: has_applied_all(index, worker), what="all messages are applied")
        assert await indexed(index, worker) == published(worker)


async def test_a_snapshot_of_an_unknown_worker_is_requested(servers: Servers, nats_client: Client) -> None:
    worker = BusPublisher(nats_client, "w0", incarnation=41)
    worker.seq = 7
    requests: list[ControlRequest] = []

    async def on_request(msg: Msg) -> None:
        requests.append(ControlRequest.unpack(msg.data))

    await nats_client.subscribe(control_subject(worker.worker_id), cb=on_request)
    async with servers.replica("a") as a:

        async def beat_until_requested() -> bool:
            await worker.beat()
            return bool(requests)

        await until(beat_until_requested, what="a snapshot is requested")
        assert requests[0] == ControlRequest(op=ControlOp.SNAPSHOT, above=41, partitions=64)
        assert a.doubts == {"w0": "unknown"}
        await worker.start(incarnation=42)

        async def settled() -> bool:
            await worker.beat()
            return not a.doubts

        await until(settled, what="the doubt is over")


async def test_a_gap_is_repaired_by_a_snapshot(servers: Servers, nats_client: Client, index: RedisIndex) -> None:
    worker = BusPublisher(nats_client, "w0")

    async def on_request(msg: Msg) -> None:
        request = ControlRequest.unpack(msg.data)
        if request.above >= worker.incarnation:
            await worker.start(incarnation=request.above + 1)

    await nats_client.subscribe(control_subject(worker.worker_id), cb=on_request)
    async with servers.replica("a") as a:
        await until(lambda: reads_to_the_end(a), what="every partition is read")
        await start_all([worker])
        worker.seq += 1  # a message that the stream never got
        await worker.store_more()

        async def repaired() -> bool:
            await worker.beat()
            return worker.incarnation > 1 and await has_applied_all(index, worker)

        await until(repaired, what="the snapshot is applied")
        assert await indexed(index, worker) == published(worker)
        assert a.counters.gaps == 1
        assert a.counters.snapshots_asked >= 1


async def test_a_store_that_lost_everything_is_filled_again(
    servers: Servers, nats_client: Client, index: RedisIndex
) -> None:
    workers = [BusPublisher(nats_client, f"w{i}") for i in range(4)]

    async def on_request(msg: Msg) -> None:
        worker = next(worker for worker in workers if control_subject(worker.worker_id) == msg.subject)
        request = ControlRequest.unpack(msg.data)
        if request.above >= worker.incarnation:
            await worker.start(incarnation=request.above + 1)

    await nats_client.subscribe("kvatlas.control.*", cb=on_request)
    async with servers.replica("a") as a:
        await until(lambda: reads_to_the_end(a), what="every partition is read")
        await start_all(workers)
        await until(lambda: has_applied_all(index, *workers), what="all messages are applied")
        await servers.valkey.kill()
        await servers.valkey.start()
        await workers[0].store_more()  # the others stay quiet

        async def filled() -> bool:
            for worker in workers:
                await worker.beat()
            try:
                return await has_applied_all(index, *workers)
            except Unreachable:
                return False

        await until(filled, what="every worker's snapshot is applied")
        async with router(servers.valkey.url) as opened_later:
            assert await indexed(opened_later, *workers) == published(*workers)
        assert all(worker.incarnation == 2 for worker in workers)


async def test_the_owner_grants_large_snapshots_up_to_its_limit(servers: Servers, nats_client: Client) -> None:
    async def ask(worker_id: str, megabytes: int) -> GrantReply:
        request = GrantRequest(worker_id=worker_id, incarnation=1, snapshot_bytes=megabytes << 20)
        reply = await nats_client.request(grant_subject(worker_id, PARTITIONS), request.pack(), timeout=60)
        return GrantReply.unpack(reply.data)

    async with servers.replica("a") as a:
        await until(lambda: reads(a) == ALL, what="a reads everything")
        assert (await ask("w0", 20)).granted
        assert (await ask("w1", 10)).granted
        refused = await ask("w2", 10)
        assert not refused.granted and refused.retry_after_ms > 0
        w0 = BusPublisher(nats_client, "w0")
        await w0.start(incarnation=1)
        await until(lambda: a.granted_bytes == 10 << 20, what="the grant ends with the snapshot")
        assert (await ask("w2", 10)).granted


async def test_a_heartbeat_becomes_a_fleet_record(servers: Servers, nats_client: Client, fleet: FleetStore) -> None:
    worker = BusPublisher(nats_client, "w0")
    async with servers.replica("a") as a:
        await until(lambda: reads(a) == ALL, what="a reads everything")

        async def known() -> bool:
            await worker.beat(acked_seq=-1)
            return "w0" in await fleet.all()

        await until(known, what="routers see the worker")
        record = (await fleet.all())["w0"]
        assert record.routable and record.liveness is Liveness.ALIVE


async def test_the_status_page(servers: Servers, nats_client: Client) -> None:
    async with servers.replica("a") as a:
        await until(lambda: reads_to_the_end(a), what="every partition is read")
        worker = BusPublisher(nats_client, "w0")
        await start_all([worker])
        await until(lambda: a.counters.applied == 2, what="all messages are applied")
        assert a.status_url is not None
        async with http_client(base_url=a.status_url) as http:
            assert (await http.get("/healthz")).status_code == 200
            assert (await http.get("/readyz")).status_code == 200
            status = (await http.get("/status")).json()
        assert status["member_id"] == "a"
        assert [partition["partition"] for partition in status["partitions"]] == ALL
        assert status["counters"]["applied"] == 2
        assert status["counters"]["event_lag"]["p50_ms"] is not None


async def test_start_errors_are_one_line(servers: Servers, store: Store, nats_client: Client) -> None:
    closed = f"nats://127.0.0.1:{free_port()}"
    with pytest.raises(Unreachable, match=closed.removeprefix("nats://")):
        await run_indexer(servers.settings("a", nats_url=closed, wait=False))
    with pytest.raises(Unreachable, match="Redis at"):
        await run_indexer(servers.settings("a", redis_url=f"redis://127.0.0.1:{free_port()}", wait=False))
    await open_redis_index(store, partitions=PARTITIONS, shards=1, writer=True)
    with pytest.raises(LayoutMismatch):
        await run_indexer(servers.settings("a", partitions=32, wait=False))
    with pytest.raises(SettingsError, match=f"127.0.0.1:{servers.nats.port}"):
        await run_indexer(servers.settings("a", status_port=servers.nats.port))
