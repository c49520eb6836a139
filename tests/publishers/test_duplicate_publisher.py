"""Two publishers of one worker: the older one yields and, once the newer one is gone, takes the worker back."""

import anyio
import pytest

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.bus.subjects import control_subject
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from tests.eventually import until
from tests.publishers.published_stream import PARTITIONS, read_stream

pytestmark = pytest.mark.anyio

SETTINGS = PublisherSettings(worker_id="w", model_id="model", block_size=16, partitions=PARTITIONS)


def changelog() -> Changelog:
    return Changelog("w", Ledger(LedgerSettings("model", "model")), PublisherCounters())


def started() -> Changelog:
    one = changelog()
    one.require_incarnation(IncarnationReason.START)
    assert one.begin_incarnation(one.next_incarnation(1), 1)
    return one


def test_only_a_higher_incarnation_is_another_publishers_and_newer() -> None:
    one = started()
    own = one.outbox.incarnation
    assert [one.record_heartbeat(incarnation) for incarnation in (0, own - 1, own, own + 1)] == [
        False,
        False,
        False,
        True,
    ]


def test_no_publisher_is_newer_than_one_that_has_not_started() -> None:
    assert not changelog().record_heartbeat(1 << 60)


def test_a_publisher_that_yielded_begins_nothing_until_it_takes_over_above_the_other() -> None:
    one = started()
    other = one.outbox.incarnation + 1
    assert one.record_heartbeat(other)
    one.yield_worker()
    assert one.outbox.take() is None
    assert not one.begin_incarnation(one.next_incarnation(2), 2)
    one.take_over()
    assert one.begin_incarnation(one.next_incarnation(3), 3)
    assert one.outbox.incarnation > other


async def test_a_publisher_of_another_fleet_is_no_newer_one(fresh_nats: str, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Publisher(SETTINGS.model_copy(update={"fleet_id": "00000000000a"}), nats=fresh_nats) as ours,
        Publisher(SETTINGS.model_copy(update={"fleet_id": "00000000000b"}), nats=fresh_nats) as theirs,
    ):
        lines = [f"a publisher of fleet 00000000000{one} publishes it here too and is ignored" for one in "ab"]
        await until(lambda: all(line in caplog.text for line in lines), what="both say so")
        assert not (ours.changelog.yielded or theirs.changelog.yielded)


async def test_the_index_follows_the_newer_publisher_and_then_the_older_again(fresh_nats: str) -> None:
    client = await connect_nats(fresh_nats, name="test")
    try:
        await ensure_stream(client, StreamSettings(storage="memory"))
        async with Publisher(SETTINGS, nats=fresh_nats) as older:
            await older.stored(list(range(32)))
            await older.flush()
            async with Publisher(SETTINGS, nats=fresh_nats) as newer:
                await newer.stored(list(range(48)))
                await newer.flush()
                await until(lambda: older.changelog.yielded, what="the older one yields")
                assert older.counters.yields == 1
                asked = ControlRequest(op=ControlOp.DIGEST).pack()
                with anyio.fail_after(60):
                    answer = await client.request(control_subject("w"), asked, timeout=60)
                assert ControlReply.unpack(answer.data).incarnation == newer.changelog.outbox.incarnation
                await older.stored(list(range(1000, 1016)))
                assert not newer.changelog.yielded
            await until(lambda: not older.changelog.yielded, what="the older one takes the worker back")
            await older.flush()
            published = await read_stream(client)
            assert await published.index.digest("w") == older.ledger.digest.words
            assert older.ledger.digest.blocks == 3
    finally:
        await client.close()
