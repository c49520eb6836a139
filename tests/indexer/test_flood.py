"""While one publisher floods, the other workers are indexed, heard and repaired all the same."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client

from kvatlas.embedded import EmbeddedServer
from kvatlas.embedded.child_process import child_command
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from tests.end_to_end.processes import environment, service
from tests.eventually import until
from tests.indexer import flooder
from tests.indexer.bus_publisher import PARTITIONS, BusPublisher, has_applied_all
from tests.indexer.running_replica import answering_requests

pytestmark = pytest.mark.anyio

MESSAGES = 20


@contextmanager
def flooding(nats_url: str) -> Iterator[None]:
    """A separate process floods, at its own pace."""
    command = child_command([sys.executable, "-m", flooder.__name__, nats_url])
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "flooding\n"
            yield
            assert process.poll() is None
        finally:
            process.kill()


async def test_a_flood_of_one_publisher_delays_no_other_worker_for_as_long_as_it_lasts(
    nats: EmbeddedServer, nats_client: Client, valkey: EmbeddedServer, store: Store, fleet: FleetStore, tmp_path: Path
) -> None:
    """A connection delivers in order, so events that share one with the flood wait behind all of it."""
    flags = ["--nats-url", nats.url, "--redis-url", valkey.url, "--partitions", str(PARTITIONS)]
    worker = BusPublisher(nats_client, "w0")
    async with service("indexer", *flags, "--stream-storage", "memory", ready="is ready", cwd=tmp_path):
        index = await open_redis_index(store, writer=False)
        await worker.start()
        async with answering_requests(nats_client, [worker]):
            with flooding(nats.url):

                async def is_applied() -> bool:
                    return await has_applied_all(index, worker)

                async def is_heard() -> bool:
                    records = await fleet.all()
                    return {"w0", flooder.WORKER} <= records.keys() and records["w0"].incarnation == worker.incarnation

                for number in range(MESSAGES):
                    await worker.store_more()
                    await until(is_applied, what=f"event {number} is applied")
                await until(is_heard, what="both are heard")
                before = worker.incarnation
                await store.client.flushall()
                await until(
                    lambda: worker.incarnation > before, what="a snapshot is requested of a wiped store's worker"
                )
                await until(is_applied, what="the snapshot is applied")
                await until(is_heard, what="the worker is heard with it")
