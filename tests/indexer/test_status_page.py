"""A replica's page: partitions, and workers with their last repair."""

import re

import pytest
from nats.aio.client import Client

from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import alive_subject, partition_of
from tests.eventually import until
from tests.http_client import http_client
from tests.indexer.bus_publisher import PARTITIONS, SCOPE, BusPublisher, heartbeat
from tests.indexer.running_replica import answering_requests, running_replica
from tests.kvatlas.index.message_source import BLOCK_SIZE
from tests.kvatlas.status_page.page_text import texts

pytestmark = pytest.mark.anyio

TOKENS = list(range(100, 100 + 4 * BLOCK_SIZE))


async def beat(client: Client, worker: BusPublisher) -> None:
    """Send a heartbeat with a block size, like a publisher that has published blocks."""
    made = heartbeat(worker)
    endpoint = made.endpoint.model_copy(update={"block_size": BLOCK_SIZE})
    await client.publish(alive_subject(worker.worker_id), made.model_copy(update={"endpoint": endpoint}).pack())
    await client.flush()


async def test_the_page_shows_partitions_and_workers(fresh_nats: str, fresh_valkey: str) -> None:
    client = await connect_nats(fresh_nats, name="test", wait=False)
    try:
        async with (
            running_replica(fresh_nats, fresh_valkey, status_port=0) as replica,
            http_client(base_url=replica.status_url or "", timeout=60) as http,
        ):
            worker = BusPublisher(client, "w0")
            await worker.start()
            await worker.send(worker.store(SCOPE, extend_chain(TOKENS, BLOCK_SIZE)))

            async def page() -> str:
                await beat(client, worker)
                return texts((await http.get("/")).text)

            rows = (
                r"a \| 64 \| 0-63 \| 0 \| none \| [\d.]+ s ago \|",
                rf"{partition_of('w0', PARTITIONS)} \| a \| 0 \| none \| [\d.]+ s ago \|",
                r"w0 \| up \| model \| 4 hbm \| – \| – \| – \| [\d.]+ s ago \| – \|",
            )

            async def shows_all() -> bool:
                found = await page()
                return all(re.search(row, found) for row in rows)

            await until(shows_all, what="the page shows partitions and the worker's blocks")
    finally:
        await client.close()


async def test_the_page_says_why_a_worker_was_repaired_last(fresh_nats: str, fresh_valkey: str) -> None:
    client = await connect_nats(fresh_nats, name="test", wait=False)
    try:
        async with (
            running_replica(fresh_nats, fresh_valkey, status_port=0) as replica,
            http_client(base_url=replica.status_url or "", timeout=60) as http,
        ):
            worker = BusPublisher(client, "w0")
            await worker.start()
            worker.seq += 1  # a message that is lost
            await worker.store_more()

            async def says(pattern: str) -> bool:
                return re.search(pattern, texts((await http.get("/")).text)) is not None

            async with answering_requests(client, [worker]):
                repaired = r"w0 \| up \| model \| 4 hbm \|.*\| [\d.]+ s ago: missing message \|"
                await until(lambda: says(repaired), what="the page tells the repair")
    finally:
        await client.close()
