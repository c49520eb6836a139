"""The embedded publisher over a real NATS server."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import anyio
import anyio.lowlevel
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest, GrantReply, GrantRequest
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import ALL_EVENTS, STREAM, alive_subject, control_subject, grant_subject
from kvatlas.embedded import EmbeddedServer, nats_server
from kvatlas.errors import InvalidValue
from kvatlas.events import Checkpoint, EngineRemoved, EngineStored, SnapshotBegin, SnapshotEnd
from kvatlas.fleet.records import EngineKind, EngineState, Heartbeat
from kvatlas.identity import Scope
from publishers.publisher import Publisher
from publishers.settings import PublisherSettings
from tests.eventually import until
from tests.publishers.engines.engine_http import engine_http
from tests.publishers.published_stream import PARTITIONS, read_stream

pytestmark = pytest.mark.anyio

SETTINGS = PublisherSettings(worker_id="w", model_id="model", block_size=16, partitions=PARTITIONS)
SCOPE = Scope("model", "model")


@pytest.fixture
async def own_server() -> AsyncIterator[EmbeddedServer]:
    """A server that the test may restart."""
    async with nats_server() as server:
        yield server


async def flushed(publisher: Publisher, deadline_s: float = 15) -> None:
    with anyio.fail_after(deadline_s):
        await publisher.flush()


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def grant_all(client: Client) -> Callable[[Msg], Awaitable[None]]:
    async def owner(msg: Msg) -> None:
        await client.publish(msg.reply, GrantReply(granted=True).pack())

    return owner


async def ask(client: Client, request: ControlRequest) -> ControlReply:
    return ControlReply.unpack((await client.request(control_subject("w"), request.pack(), timeout=5)).data)


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
        for _ in range(3):  # turns of the event loop, no time
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


# ---------------------------------------------------------------- control, grants, checkpoints


async def test_a_snapshot_request_names_the_incarnation_that_it_doubts(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)
        own = publisher.changelog.outbox.incarnation
        reply = await ask(nats_client, ControlRequest(op=ControlOp.SNAPSHOT, above=own - 1))
        assert (reply.ok, reply.incarnation) == (True, own)
        assert "above it already" in reply.note
        far = own + (1 << 40)
        assert (await ask(nats_client, ControlRequest(op=ControlOp.SNAPSHOT, above=far))).ok
        await until(lambda: publisher.changelog.outbox.incarnation > far, what="an incarnation above the named one")
        await flushed(publisher)
        assert publisher.counters.snapshots == 2
        assert publisher.counters.snapshot_requests_ignored == 1
        published = await read_stream(nats_client)
        assert await published.index.digest("w") == publisher.ledger.digest.words


async def test_an_impossible_request_is_refused_and_changes_nothing(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await flushed(publisher)
        own = publisher.changelog.outbox.incarnation
        reply = await ask(nats_client, ControlRequest(op=ControlOp.SNAPSHOT, above=(1 << 64) - 1))
        assert not reply.ok
        assert "days ahead of this clock" in reply.note
        garbage = await nats_client.request(control_subject("w"), b"\xc1", timeout=5)
        assert not ControlReply.unpack(garbage.data).ok
        assert publisher.changelog.outbox.incarnation == own
        assert publisher.counters.control_bad == 2


async def test_status_and_digest_are_answered(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)
        digest = await ask(nats_client, ControlRequest(op=ControlOp.DIGEST))
        assert digest.digest == publisher.ledger.digest.words
        assert digest.scopes is not None
        assert [(one.scope, one.digest) for one in digest.scopes] == [(SCOPE, digest.digest)]
        assert digest.status == {"told_seq": digest.acked_seq + 1}  # the checkpoint that was put for it
        assert publisher.counters.checkpoints == 1
        status = (await ask(nats_client, ControlRequest(op=ControlOp.STATUS))).status
        assert status is not None
        assert status["announced"] == 4
        assert status["counters"]["blocks_stored"] + status["counters"]["snapshot_blocks"] == 4


async def test_a_large_snapshot_waits_for_a_grant(nats_client: Client) -> None:
    asked: list[GrantRequest] = []

    async def owner(msg: Msg) -> None:
        asked.append(GrantRequest.unpack(msg.data))
        reply = GrantReply(granted=len(asked) > 2, retry_after_ms=50)
        await nats_client.publish(msg.reply, reply.pack())

    await nats_client.subscribe(grant_subject("w", PARTITIONS), cb=owner)
    async with Publisher(SETTINGS, nats=nats_client, begin=False, rng=random.Random(1)) as publisher:
        await publisher.stored(tokens(16 * 10_000))
        publisher.begin_publishing()
        await flushed(publisher)
        assert publisher.counters.snapshots == 1
        assert publisher.counters.grants_denied == 2
        assert len(asked) == 3
        assert asked[-1].snapshot_bytes >= 80_000
        assert asked[-1].incarnation == publisher.changelog.outbox.incarnation
        published = await read_stream(nats_client)
        assert await published.index.digest("w") == publisher.ledger.digest.words


async def test_while_a_grant_is_awaited_the_old_incarnation_is_told_on(nats_client: Client) -> None:
    asked: list[GrantRequest] = []

    async def owner(msg: Msg) -> None:
        asked.append(GrantRequest.unpack(msg.data))
        await nats_client.publish(msg.reply, GrantReply(granted=len(asked) == 1, retry_after_ms=1).pack())

    await nats_client.subscribe(grant_subject("w", PARTITIONS), cb=owner)
    async with Publisher(SETTINGS, nats=nats_client, begin=False, rng=random.Random(1)) as publisher:
        names = await publisher.stored(tokens(16 * 10_000))
        publisher.begin_publishing()
        await flushed(publisher)
        first = publisher.changelog.outbox.incarnation
        await ask(nats_client, ControlRequest(op=ControlOp.SNAPSHOT, above=first))
        await until(lambda: len(asked) > 2, what="the second snapshot is not granted")
        await publisher.removed(list(reversed(names[9_000:])))
        await until(lambda: asked[-1].snapshot_bytes == 9_000 * 8, what="the size asked for is that of now")
        await until(lambda: publisher.changelog.outbox.empty, what="the removals are in the stream")
        assert publisher.changelog.outbox.incarnation == first
        assert await (await read_stream(nats_client)).residencies("w") == 9_000
        await publisher.removed(list(reversed(names[5:9_000])))
        await until(lambda: publisher.changelog.outbox.incarnation > first, what="a small snapshot needs no grant")
        await flushed(publisher)
        assert await (await read_stream(nats_client)).residencies("w") == 5


async def test_without_a_grant_after_an_overflow_the_index_claims_nothing_that_may_be_gone(nats_client: Client) -> None:
    asked: list[GrantRequest] = []
    granting = True

    async def owner(msg: Msg) -> None:
        asked.append(GrantRequest.unpack(msg.data))
        await nats_client.publish(msg.reply, GrantReply(granted=granting, retry_after_ms=1).pack())

    await nats_client.subscribe(grant_subject("w", PARTITIONS), cb=owner)
    settings = SETTINGS.model_copy(update={"outbox_messages": 2})
    async with Publisher(settings, nats=nats_client, begin=False, rng=random.Random(1)) as publisher:
        names = list(await publisher.stored(tokens(16 * 10_000)))
        publisher.begin_publishing()
        await flushed(publisher)
        granting = False
        for _ in range(4):
            await publisher.removed([names.pop()])
            publisher.settle()
        assert publisher.counters.overflows == 1, "the last two removals are lost"
        await until(lambda: len(asked) > 2, what="the snapshot is not granted")
        await until(lambda: publisher.changelog.outbox.empty, what="all is in the stream")
        assert await (await read_stream(nats_client)).residencies("w") == 0
        await publisher.removed([names.pop()])
        await until(lambda: asked[-1].snapshot_bytes == 9_995 * 8, what="the size asked for is that of now")
        granting = True
        await flushed(publisher)
        published = await read_stream(nats_client)
        assert await published.residencies("w") == 9_995
        assert await published.index.digest("w") == publisher.ledger.digest.words


@pytest.mark.parametrize("max_msg_size", [100_000, 10_000])
async def test_a_stream_with_smaller_messages_gets_smaller_messages(fresh_nats: str, max_msg_size: int) -> None:
    client = await connect_nats(fresh_nats, name="test", wait=False)
    try:
        config = StreamConfig(STREAM, subjects=[ALL_EVENTS], storage=StorageType.MEMORY, max_msg_size=max_msg_size)
        await client.jetstream().add_stream(config)
        async with Publisher(SETTINGS, nats=client) as publisher:
            await flushed(publisher)
            await publisher.stored(tokens(16 * 20_000))
            await client.subscribe(grant_subject("w", PARTITIONS), cb=grant_all(client))
            await flushed(publisher)
            published = await read_stream(client)
            assert await published.residencies("w") == 20_000
            assert publisher.counters.refused_too_large and publisher.status()["trouble"] is None
    finally:
        await client.close()


async def test_a_stream_that_takes_no_event_is_named_with_the_cure(fresh_nats: str) -> None:
    client = await connect_nats(fresh_nats, name="test", wait=False)
    try:
        await client.jetstream().add_stream(
            StreamConfig(STREAM, subjects=[ALL_EVENTS], storage=StorageType.MEMORY, max_msg_size=64)
        )
        async with Publisher(SETTINGS, nats=client) as publisher:
            await publisher.stored(tokens(64))
            line = await until(lambda: publisher.status()["trouble"], what="publishing is blocked")
            assert line.startswith("message larger than the stream allows")
            assert line.endswith("expected its max_msg_size to be 8192 or more")
    finally:
        await client.close()


@pytest.mark.parametrize("where", ["heartbeat", "request", "saved state"])
async def test_an_incarnation_of_no_publisher_silences_nobody(nats_client: Client, where: str) -> None:
    highest = (1 << 64) - 1
    saved = highest if where == "saved state" else 0
    async with Publisher(SETTINGS, nats=nats_client, saved_incarnation=saved) as publisher:
        await flushed(publisher)
        if where == "heartbeat":
            beat = publisher._heartbeats.heartbeat().model_copy(update={"incarnation": highest})
            await nats_client.publish(alive_subject("w"), beat.pack())
            await until(lambda: publisher.counters.heartbeats_bad, what="the heartbeat is refused")
        elif where == "request":
            reply = await ask(nats_client, ControlRequest(op=ControlOp.SNAPSHOT, above=highest))
            assert not reply.ok and "days ahead of this clock" in reply.note and publisher.counters.control_bad == 1
        await publisher.stored(tokens(64))
        await flushed(publisher)
        assert not publisher.changelog.yielded
        assert await (await read_stream(nats_client)).residencies("w") == 4


async def test_what_the_ledger_can_not_take_in_costs_what_is_held_and_not_the_process(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)
        await publisher.stored(EngineStored([[1]], None, tokens(16), 16))  # type: ignore[list-item]
        await until(lambda: publisher.counters.folds_failed, what="the batch is refused")
        await publisher.stored(tokens(32))
        await flushed(publisher)
        assert await (await read_stream(nats_client)).residencies("w") == 2


async def test_a_small_snapshot_needs_no_grant(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client, begin=False) as publisher:
        await publisher.stored(tokens(16 * 1000))
        publisher.begin_publishing()
        await flushed(publisher)
        assert publisher.counters.grants_asked == 0
        assert len((await read_stream(nats_client)).messages) == 1


async def test_nothing_is_published_twice_while_a_grant_is_awaited(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client, begin=False) as publisher:
        await publisher.stored(tokens(16 * 10_000))
        publisher.begin_publishing()
        await until(lambda: publisher.counters.grants_unanswered, what="the partition has no owner")
        await publisher.stored(tokens(64, 1_000_000))

        async def owner(msg: Msg) -> None:
            await nats_client.publish(msg.reply, GrantReply(granted=True).pack())

        await nats_client.subscribe(grant_subject("w", PARTITIONS), cb=owner)
        await flushed(publisher)
        published = await read_stream(nats_client)
        assert await published.index.digest("w") == publisher.ledger.digest.words
        assert published.outcomes["applied"] == len(published.messages)


async def test_a_checkpoint_follows_when_a_worker_falls_idle_and_not_again(nats_client: Client) -> None:
    async with Publisher(SETTINGS, nats=nats_client) as publisher:
        await flushed(publisher)
        await publisher.stored(tokens(64))
        await until(lambda: publisher.counters.checkpoints == 1, what="the idle worker's checkpoint")
        await flushed(publisher)
        published = await read_stream(nats_client)
        assert published.messages[-1].events == [Checkpoint(publisher.ledger.digest.words)]
        assert published.outcomes["failed_checks"] == 0
        assert publisher.changelog.checkpoint_in(1e12) is None


async def test_checkpoints_follow_after_the_set_number_of_messages(nats_client: Client) -> None:
    settings = SETTINGS.model_copy(update={"checkpoint_messages": 3})
    async with Publisher(settings, nats=nats_client) as publisher:
        await flushed(publisher)
        for i in range(6):
            await publisher.stored(tokens(16, 100 * i))
            await flushed(publisher)
        await until(lambda: publisher.counters.checkpoints >= 2, what="two checkpoints")


# ---------------------------------------------------------------- heartbeats


async def test_heartbeats_have_incarnation_acked_seq_and_endpoint(nats_client: Client) -> None:
    subscription = await nats_client.subscribe(alive_subject("w"))
    settings = SETTINGS.model_copy(update={"labels": {"rack": "r1"}, "advertise_url": "http://10.0.0.1:8000"})
    async with Publisher(settings, nats=nats_client) as publisher:
        await publisher.stored(tokens(64))
        await flushed(publisher)

        async def caught_up() -> Heartbeat | None:
            beat = Heartbeat.unpack((await subscription.next_msg(timeout=5)).data)
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


async def test_an_engine_that_fell_asleep_holds_nothing_in_hbm_before_it_says_so(nats_client: Client) -> None:
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
            assert [publisher.ledger.digest.count(tier) for tier in (Tier.HBM, Tier.CPU_DRAM)] == [0, 2]


async def test_a_hybrid_model_that_metrics_show_is_labelled_in_heartbeats(nats_client: Client) -> None:
    subscription = await nats_client.subscribe(alive_subject("w"))
    with engine_http() as engine:
        engine.pages = {"/health": (200, ""), "/metrics": (200, "sglang:swa_token_usage 0.5\n")}
        settings = SETTINGS.model_copy(update={"engine_url": engine.url, "engine": EngineKind.SGLANG})
        async with Publisher(settings, nats=nats_client) as publisher:
            assert publisher.engine.poller is not None

            async def is_labelled() -> bool:
                beat = Heartbeat.unpack((await subscription.next_msg(timeout=5)).data)
                return beat.endpoint.upper_bound == "the engine tells full attention only"

            await publisher.engine.poller.poll_once()
            await until(is_labelled, what="a heartbeat that says so")
