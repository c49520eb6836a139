"""A publisher answers requests, asks for snapshot grants, and puts checkpoints into the stream."""

import random
from collections.abc import Awaitable, Callable

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import StorageType, StreamConfig

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest, GrantReply, GrantRequest
from kvatlas.bus.subjects import ALL_EVENTS, STREAM, alive_subject, control_subject, grant_subject
from kvatlas.events import Checkpoint
from kvatlas_publishers.engine_events import EngineStored
from kvatlas_publishers.publisher import Publisher
from tests.eventually import until
from tests.publishers.published_stream import PARTITIONS, SCOPE, SETTINGS, ask, flushed, read_stream, tokens

pytestmark = pytest.mark.anyio


def grant_all(client: Client) -> Callable[[Msg], Awaitable[None]]:
    async def owner(msg: Msg) -> None:
        await client.publish(msg.reply, GrantReply(granted=True).pack())

    return owner


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
        garbage = await nats_client.request(control_subject("w"), b"\xc1", timeout=60)
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
        assert digest.status == {"told_seq": digest.acked_seq + 1}  # the checkpoint put in for it
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
