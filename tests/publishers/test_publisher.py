"""The embedded publisher over a real NATS server."""

from collections.abc import AsyncIterator
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import ControlOp, ControlRequest
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import ALL_EVENTS, STREAM, alive_subject
from kvatlas.embedded import EmbeddedServer, nats_server
from kvatlas.errors import InvalidValue
from kvatlas.events import SnapshotBegin, SnapshotEnd
from kvatlas.fleet.records import EngineKind, EngineState, Heartbeat
from kvatlas_publishers.engine_events import EngineRemoved, EngineStored
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from tests.eventually import until
from tests.publishers.engines.engine_http import engine_http
from tests.publishers.published_stream import SCOPE, SETTINGS, ask, flushed, read_stream, tokens

pytestmark = pytest.mark.anyio


@pytest.fixture
async def own_server() -> AsyncIterator[EmbeddedServer]:
    """A server that the test may restart."""
    async with nats_server() as server:
        yield server


# ---------------------------------------------------------------- publishing


async def test_what_was_stored_and_removed_is_in_the_stream_after_a_flush(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        names = await publisher.stored(tokens(64))
        more = await publisher.stored(tokens(32, 1000), parent=names[-1], tier="cpu")
        await publisher.removed(more[-1:], tier=Tier.CPU_DRAM)
        await flushed(publisher)
        published = await read_stream(nats_client)
        chain = extend_chain(tokens(64) + tokens(32, 1000), 16)
        overlap = await published.index.overlap(SCOPE, chain)
        assert overlap.depths() == {"w": 5}
        assert await published.index.digest("w") == publisher.ledger.digest.words
        assert publisher.counters.acks == len(published.messages) == published.outcomes["applied"]


async def test_an_event_after_silence_does_not_linger(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await flushed(publisher)
        await publisher.stored(tokens(16))
        for _ in range(3):  # turns of the event loop, not time
            await anyio.lowlevel.checkpoint()
        assert not publisher.changelog.pending_events and publisher.changelog.outbox.in_flight == 1


async def test_an_engines_own_hashes_can_be_stored_removed_and_cleared(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await publisher.stored(EngineStored([7, -8], None, tokens(32), 16))
        await publisher.removed(EngineRemoved([-8]))
        await flushed(publisher)
        assert await (await read_stream(nats_client)).residencies("w") == 1
        await publisher.cleared()
        await flushed(publisher)
        assert await (await read_stream(nats_client)).residencies("w") == 0


async def test_names_differ_by_adapter_and_salt(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        plain, adapted, salted = [
            await publisher.stored(tokens(16), adapter=adapter, salt=salt)
            for adapter, salt in ((None, None), ("lora", None), (None, "pepper"))
        ]
        assert len({*plain, *adapted, *salted}) == 3
        with pytest.raises(InvalidValue, match="parent"):
            await publisher.stored(tokens(16), parent=adapted[0])
        await flushed(publisher)
        assert await (await read_stream(nats_client)).residencies("w") == 3


async def test_token_ids_need_a_block_size(nats_client: Client) -> None:
    publisher = Publisher(PublisherSettings(worker_id="w", model_id="m"), nats=nats_client)
    with pytest.raises(InvalidValue, match="block size"):
        await publisher.stored(tokens(16))


async def test_an_incarnation_begins_with_a_snapshot_and_numbers_its_messages(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        for i in range(5):
            await publisher.stored(tokens(16, 1000 * i))
            await flushed(publisher)
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await flushed(publisher)
    messages = (await read_stream(nats_client)).messages
    first = [m for m in messages if m.incarnation == messages[0].incarnation]
    second = messages[len(first) :]
    assert isinstance(first[0].events[0], SnapshotBegin)
    assert isinstance(first[0].events[-1], SnapshotEnd)
    assert [m.seq for m in first] == list(range(len(first)))
    assert [m.seq for m in second] == [0]
    assert second[0].incarnation > first[0].incarnation


async def test_batches_recorded_together_share_a_message(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await flushed(publisher)
        for i in range(200):
            await publisher.stored(tokens(16, 1000 * i))
        await flushed(publisher)
        assert publisher.counters.messages < 10
        assert await (await read_stream(nats_client)).residencies("w") == 200


async def test_several_publishers_share_one_connection(nats_client: Client) -> None:
    async with (
        Publisher(SETTINGS, nats=nats_client) as one,
        Publisher(SETTINGS.model_copy(update={"worker_id": "v"}), nats=nats_client) as two,
    ):
        await one.stored(tokens(64))
        await two.stored(tokens(32))
        await flushed(one)
        await flushed(two)
    assert not nats_client.is_closed
    published = await read_stream(nats_client)
    assert (await published.index.overlap(SCOPE, extend_chain(tokens(64), 16))).depths() == {"w": 4, "v": 2}


async def test_a_publisher_given_a_url_connects_by_itself(nats_client: Client, nats_url: str) -> None:
    async with Publisher(SETTINGS, nats=nats_url) as publisher:
        await publisher.stored(tokens(16))
        await flushed(publisher)
    assert await (await read_stream(nats_client)).residencies("w") == 1


# ---------------------------------------------------------------- failures of the bus


async def test_messages_are_sent_again_after_a_server_restart(own_server: EmbeddedServer) -> None:
    client = await connect_nats(own_server.url, name="test")
    await ensure_stream(client, StreamSettings())
    async with Publisher(SETTINGS, nats=client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)
        incarnation = publisher.changelog.outbox.incarnation
        await own_server.kill()
        await publisher.stored(tokens(64, 5000))
        await until(lambda: not client.is_connected, what="the connection is gone")
        await publisher.stored(tokens(64, 9000))
        await own_server.start()
        await flushed(publisher)
        published = await read_stream(client)
        assert await published.index.digest("w") == publisher.ledger.digest.words
        assert publisher.changelog.outbox.incarnation == incarnation
        assert publisher.counters.disconnects == 1
    await client.close()


async def test_an_overflow_ends_in_a_new_incarnation_with_everything(own_server: EmbeddedServer) -> None:
    client = await connect_nats(own_server.url, name="test")
    await ensure_stream(client, StreamSettings())
    settings = SETTINGS.model_copy(update={"outbox_messages": 5})
    async with Publisher(settings, nats=client) as publisher:
        await flushed(publisher)
        before = publisher.changelog.outbox.incarnation
        await own_server.kill()
        await until(lambda: not client.is_connected, what="the connection is gone")
        for i in range(10):
            await publisher.stored(tokens(160, 1000 * i))
            publisher.settle()
        assert publisher.counters.overflows == 1
        await own_server.start()
        await flushed(publisher)
        published = await read_stream(client)
        assert await published.index.digest("w") == publisher.ledger.digest.words
        assert publisher.ledger.digest.blocks == 100
        assert publisher.changelog.outbox.incarnation > before
        assert publisher.counters.snapshots == 2
    await client.close()


async def test_a_missing_stream_is_named_and_waited_for(fresh_nats: str) -> None:
    client = await connect_nats(fresh_nats, name="test")
    async with Publisher(SETTINGS, nats=client) as publisher:
        await publisher.stored(tokens(64))
        await until(lambda: publisher.counters.refused_no_stream >= 2, what="the refusal is counted")
        assert "no stream for the subject" in publisher.status()["trouble"]
        await ensure_stream(client, StreamSettings(storage="memory"))
        await flushed(publisher)
        assert publisher.status()["trouble"] is None
        assert await (await read_stream(client)).residencies("w") == 4
    await client.close()


async def test_a_full_stream_is_named_and_waited_for(fresh_nats: str) -> None:
    client = await connect_nats(fresh_nats, name="test")
    jetstream = client.jetstream()
    config = StreamConfig(
        name=STREAM, subjects=[ALL_EVENTS], storage=StorageType.MEMORY, discard=DiscardPolicy.NEW, max_bytes=3000
    )
    await jetstream.add_stream(config)
    async with Publisher(SETTINGS, nats=client) as publisher:
        for i in range(8):
            await publisher.stored(tokens(16 * 64, 10_000 * i))
            publisher.settle()
        await until(lambda: publisher.counters.refused_no_space, what="the refusal is counted")
        assert "no space in the stream (maximum bytes exceeded)" in publisher.status()["trouble"]
        config.max_bytes = 1 << 20
        await jetstream.update_stream(config)
        await flushed(publisher)
        published = await read_stream(client)
        assert await published.index.digest("w") == publisher.ledger.digest.words
    await client.close()


async def test_a_stream_that_was_created_again_takes_what_follows(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)
        await nats_client.jetstream().delete_stream(STREAM)
        await ensure_stream(nats_client, StreamSettings(storage="memory"))
        await publisher.stored(tokens(64, 5000))
        await flushed(publisher)
        await ask(nats_client, ControlRequest(op=ControlOp.SNAPSHOT, above=publisher.changelog.outbox.incarnation))
        await until(lambda: publisher.counters.snapshots == 2, what="the snapshot begins")
        await flushed(publisher)
        published = await read_stream(nats_client)
        assert await published.index.digest("w") == publisher.ledger.digest.words


# ---------------------------------------------------------------- heartbeats


async def test_heartbeats_have_incarnation_acked_seq_and_endpoint(nats_client: Client) -> None:
    subscription = await nats_client.subscribe(alive_subject("w"))
    settings = SETTINGS.model_copy(update={"labels": {"rack": "r1"}, "advertise_url": "http://10.0.0.1:8000"})
    async with Publisher(settings, nats=nats_client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)

        async def caught_up() -> Heartbeat | None:
            beat = Heartbeat.unpack((await subscription.next_msg(timeout=60)).data)
            return beat if beat.acked_seq == publisher.changelog.outbox.next_seq - 1 else None

        beat = await until(caught_up, what="a heartbeat with the last acknowledged seq")
        assert beat is not None
        assert beat.incarnation == publisher.changelog.outbox.incarnation
        assert beat.state is EngineState.UP
        assert beat.endpoint.labels == {"rack": "r1"}
        assert beat.endpoint.url == "http://10.0.0.1:8000"
        assert beat.endpoint.block_size == 16


async def test_a_gentle_close_says_draining_after_everything_is_published(nats_client: Client) -> None:
    subscription = await nats_client.subscribe(alive_subject("w"))
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await flushed(publisher)
        await publisher.stored(tokens(64))
        await publisher.close_gently(deadline_s=15)
        last = publisher.changelog.outbox.next_seq - 1
    beats: list[Heartbeat] = []

    async def says_all() -> bool:
        while subscription.pending_msgs:
            beats.append(Heartbeat.unpack((await subscription.next_msg(timeout=1)).data))
        return bool(beats) and (beats[-1].state, beats[-1].acked_seq) == (EngineState.DRAINING, last)

    await until(says_all, what="the last heartbeat says draining, and all that was published")
    assert all(a.sent_us <= b.sent_us for a, b in pairwise(beats))


async def test_an_engine_that_fell_asleep_holds_nothing_of_its_own_before_it_says_so(nats_client: Client) -> None:
    with engine_http() as engine:
        engine.pages = {"/health": (200, ""), "/metrics": (200, "")}
        settings = SETTINGS.model_copy(update={"engine_url": engine.url})
        async with Publisher(settings, nats=nats_client) as publisher:
            assert publisher.engine.poller is not None
            await publisher.engine.poller.poll_once()
            await publisher.stored(tokens(64))
            await publisher.stored(tokens(32), tier="cpu")
            await flushed(publisher)
            engine.pages["/metrics"] = (200, 'vllm:engine_sleep_state{sleep_state="awake"} 0\n')
            await publisher.engine.poller.poll_once()
            await flushed(publisher)
            assert [publisher.ledger.digest.count(tier) for tier in (Tier.HBM, Tier.CPU_DRAM)] == [0, 0]


async def test_a_hybrid_model_that_metrics_show_is_labelled_in_heartbeats(nats_client: Client) -> None:
    subscription = await nats_client.subscribe(alive_subject("w"))
    with engine_http() as engine:
        engine.pages = {"/health": (200, ""), "/metrics": (200, "sglang:swa_token_usage 0.5\n")}
        settings = SETTINGS.model_copy(update={"engine_url": engine.url, "engine": EngineKind.SGLANG})
        async with Publisher(settings, nats=nats_client) as publisher:
            assert publisher.engine.poller is not None

            async def is_labelled() -> bool:
                beat = Heartbeat.unpack((await subscription.next_msg(timeout=60)).data)
                return beat.endpoint.upper_bound == "the engine reports full attention only"

            await publisher.engine.poller.poll_once()
            await until(is_labelled, what="a heartbeat that says so")
