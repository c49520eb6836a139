"""A replica in the test's own process, and publishers that answer snapshot requests."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.control import ControlOp, ControlRequest
from kvatlas.bus.subjects import control_subject
from kvatlas_indexer.indexer_process import Replica
from kvatlas_indexer.service import IndexerSettings, run_indexer
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher


@asynccontextmanager
async def running_replica(nats_url: str, redis_url: str, **settings: object) -> AsyncIterator[Replica]:
    """A replica that has read every partition to the end; leaving the context stops it cleanly."""
    started: list[Replica] = []
    given = {"nats_url": nats_url, "redis_url": redis_url, "member_id": "a", "stream_storage": "memory", **settings}
    async with anyio.create_task_group() as group:
        group.start_soon(run_indexer, IndexerSettings.load(**given), started.append)
        await until(lambda: started, what="the replica is ready")
        replica = started[0]
        await until(
            lambda: len(replica.partitions) > 0 and all(one.at_end for one in replica.partitions),
            deadline_s=30,
            what="every partition is read",
        )
        yield replica
        group.cancel_scope.cancel()


@asynccontextmanager
async def answering_requests(
    nats_client: Client, workers: Sequence[BusPublisher], beat_s: float = 0.2
) -> AsyncIterator[None]:
    """Let the publishers send heartbeats, and a snapshot on request."""

    async def on_request(msg: Msg) -> None:
        worker = next(worker for worker in workers if control_subject(worker.worker_id) == msg.subject)
        request = ControlRequest.unpack(msg.data)
        if request.op is ControlOp.SNAPSHOT and request.above >= worker.incarnation:
            await worker.start(incarnation=request.above + 1)

    async def beat() -> None:
        while True:
            for worker in workers:
                await worker.beat()
            await anyio.sleep(beat_s)

    subscription = await nats_client.subscribe("kvatlas.control.*", cb=on_request)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(beat)
            yield
            group.cancel_scope.cancel()
    finally:
        await subscription.unsubscribe()
