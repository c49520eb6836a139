"""The example of NATS permissions in a real server: a publisher may speak only for its own worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.aio.client import Client

from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.bus.subjects import ALL_ALIVE, ALL_GRANTS, alive_subject, control_subject, events_subject, grant_subject
from kvatlas.embedded import EmbeddedServer, nats_server
from tests.deployment.tools import ROOT

pytestmark = pytest.mark.anyio

EXAMPLE = (ROOT / "docs/nats-permissions.conf").read_text()
PARTITIONS = 64


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def nats_with_permissions() -> AsyncIterator[EmbeddedServer]:
    async with nats_server(config=EXAMPLE) as started:
        yield started


@asynccontextmanager
async def connect_as(
    server: EmbeddedServer, name: str, password: str
) -> AsyncIterator[tuple[Client, asyncio.Queue[str]]]:
    """A connection as one of the example's users, and the errors that the server sends it."""
    refused: asyncio.Queue[str] = asyncio.Queue()

    async def record(error: Exception) -> None:
        refused.put_nowait(str(error))

    client = Client()
    await client.connect(f"nats://{name}:{password}@127.0.0.1:{server.port}", error_cb=record, allow_reconnect=False)
    try:
        yield client, refused
    finally:
        await client.close()


async def test_a_publisher_may_write_only_its_own_subjects(nats_with_permissions: EmbeddedServer) -> None:
    async with (
        connect_as(nats_with_permissions, "indexer", "change-me-indexer") as (indexer, refused_indexer),
        connect_as(nats_with_permissions, "worker-w1", "change-me-w1") as (publisher, refused),
    ):
        await ensure_stream(indexer, StreamSettings(storage="memory", max_bytes=1 << 20))
        answer = await publisher.request(events_subject("w1", PARTITIONS), b"x", timeout=5)
        assert b'"seq":1' in answer.data.replace(b" ", b"")
        for subject in (events_subject("w2", PARTITIONS), alive_subject("w2"), "$JS.API.STREAM.DELETE.KVATLAS_EVENTS"):
            await publisher.publish(subject, b"x")
            line = await asyncio.wait_for(refused.get(), 5)
            assert "permissions violation" in line.lower() and subject.lower() in line.lower()
        assert (await stream_info(indexer)).last_seq == 1
        assert refused_indexer.empty()


async def test_indexer_and_publisher_may_send_each_other_requests(nats_with_permissions: EmbeddedServer) -> None:
    async with (
        connect_as(nats_with_permissions, "indexer", "change-me-indexer") as (indexer, refused_indexer),
        connect_as(nats_with_permissions, "worker-w1", "change-me-w1") as (publisher, refused),
    ):
        alive = await indexer.subscribe(ALL_ALIVE)
        grants = await indexer.subscribe(ALL_GRANTS)
        control = await publisher.subscribe(control_subject("w1"))
        for client in (indexer, publisher):
            await client.flush(5)

        await publisher.publish(alive_subject("w1"), b"beat")
        assert (await alive.next_msg(5)).data == b"beat"
        for asker, subject, answers in (
            (indexer, control_subject("w1"), control),
            (publisher, grant_subject("w1", 64), grants),
        ):
            question = asyncio.ensure_future(asker.request(subject, b"?", timeout=5))
            await (await answers.next_msg(5)).respond(b"!")
            assert (await question).data == b"!"
        assert refused.empty() and refused_indexer.empty()
