"""Rogue publishers and auditors at NATS: attacks with a real user's password on another publisher's worker."""

from time import time_ns

import msgpack
import pytest

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.subjects import alive_subject, control_subject, events_subject, grant_subject
from kvatlas.fleet.records import EngineKind, EngineState
from kvatlas.store.connection import open_store
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from tests.attacks.attacked_fleet import AttackedFleet, AttackedServers, attacked_fleet, attacked_servers
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, BusPublisher, heartbeat
from tests.kvatlas_cli.auth.guarded_servers import connected

pytestmark = pytest.mark.anyio

STREAM = "KVATLAS_EVENTS"


def false_events(fleet: AttackedFleet) -> bytes:
    """A new incarnation of the victim that holds nothing."""
    return msgpack.packb(BusPublisher(fleet.victim._client, "victim", time_ns()).begin(time_ns()))


WRITES = {
    "empty its cache": events_subject("victim", PARTITIONS),
    "say that it is gone, or elsewhere": alive_subject("victim"),
    "have it send snapshots": control_subject("victim"),
    "take its room in the stream": grant_subject("victim", PARTITIONS),
    "answer the indexer": "_INBOX.indexer.x",
    "answer it": "_INBOX.honest.x",
    "delete the stream": f"$JS.API.STREAM.DELETE.{STREAM}",
    "empty the stream": f"$JS.API.STREAM.PURGE.{STREAM}",
    "change the stream": f"$JS.API.STREAM.UPDATE.{STREAM}",
    "fill the disk with a stream": "$JS.API.STREAM.CREATE.ROGUE",
    "read the stream": f"$JS.API.CONSUMER.CREATE.{STREAM}.rogue",
    "read one message": f"$JS.API.STREAM.MSG.GET.{STREAM}",
    "delete a message": f"$JS.API.STREAM.MSG.DELETE.{STREAM}",
    "stop a consumer": f"$JS.API.CONSUMER.DELETE.{STREAM}.x",
    "stop the server": "$SYS.REQ.SERVER.X.RELOAD",
}
BY_AUDITORS_TOO = {"have it send snapshots", "read one message", "change the stream"}
"""Acts that are part of an auditor's work, or that NATS acknowledges without carrying them out."""
READS = ["kvatlas.>", "kvatlas.events.>", alive_subject("victim"), control_subject("victim"), "_INBOX.>", "$JS.>", ">"]


@pytest.mark.parametrize("user", ["rogue", "auditor"])
async def test_a_user_that_writes_out_of_its_role_is_refused(with_users: AttackedServers, user: str) -> None:
    acts = {act: subject for act, subject in WRITES.items() if user == "rogue" or act not in BY_AUDITORS_TOO}
    async with (
        attacked_fleet(with_users) as fleet,
        connected(NatsAccess(with_users.nats_url(user))) as (client, refused),
    ):
        payload = false_events(fleet)
        for act, subject in acts.items():
            refused.clear()
            await client.publish(subject, payload)
            await until(lambda: refused, what=act)
            assert "permissions violation" in refused[0] and subject.lower() in refused[0]
        await fleet.check()


async def test_a_publisher_that_reads_others_is_refused(with_users: AttackedServers) -> None:
    async with connected(NatsAccess(with_users.nats_url("rogue"))) as (client, refused):
        for subject in READS:
            refused.clear()
            await client.subscribe(subject)
            await until(lambda: refused, what=subject)
            assert "permissions violation for subscription" in refused[0]


async def test_false_messages_on_its_own_subject_change_only_its_own_worker(servers: AttackedServers) -> None:
    """It signs as the victim, sends invalid messages, and counts up to the last number: with users and without."""
    async with attacked_fleet(servers) as fleet, connected(NatsAccess(servers.nats_url("rogue"))) as (client, refused):
        await client.publish(alive_subject("rogue"), heartbeat(fleet.victim).pack())
        own = BusPublisher(client, "rogue", 2**64 - 1)
        await own.publish(false_events(fleet))
        for payload in (b"", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\0" * 500_000):
            await own.publish(payload)
        await client.flush()
        await until(lambda: fleet.replica.counters.poison >= 5, what="the messages are refused and counted")
        assert refused == []
        await fleet.check()


async def test_a_publisher_of_another_fleet_puts_nothing_into_the_index_even_as_the_workers_own_user(
    servers: AttackedServers, caplog: pytest.LogCaptureFixture
) -> None:
    """No indexer is running to refuse it when it starts; the next one finds its messages in the stream."""
    async with attacked_fleet(servers):
        pass
    settings = PublisherSettings(
        worker_id="victim", model_id="model", tokenizer_id="tokenizer", engine=EngineKind.OPEN, fleet_id="00000000000b"
    )
    async with Publisher(settings, nats=NatsAccess(servers.nats_url("honest"))) as other:
        await other.stored(list(range(64)), block_size=16)
        await other.flush()
        async with attacked_fleet(servers) as fleet:
            await until(lambda: fleet.replica.counters.poison_fleet > 0, what="its messages are refused")
            await fleet.check()
    assert (
        "message on kvatlas.events.34.victim was not applied (fleet): its publisher is of fleet 00000000000b"
        in caplog.text
    )


async def test_without_users_anyone_may_speak_for_any_worker(tmp_path_factory: pytest.TempPathFactory) -> None:
    """As docs/security.md says about the defaults, only the network protects the servers."""
    with attacked_servers(tmp_path_factory.mktemp("defaults"), users=False) as servers:
        async with attacked_fleet(servers) as fleet, connected(NatsAccess(servers.nats.url)) as (client, refused):
            false = heartbeat(fleet.victim).model_copy(update={"state": EngineState.DOWN})
            await client.publish(alive_subject("victim"), false.pack())
            store = await open_store(servers.store.url, wait=False)
            try:

                async def is_down() -> bool:
                    return all(one.state is not EngineState.UP for one in (await fleet._records(store)).values())

                await until(is_down, what="the victim counts as down")
            finally:
                await store.close()
            assert refused == []
