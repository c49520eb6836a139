"""An indexer with identities believes a publisher only what its own identity names."""

import json
import logging
from pathlib import Path
from typing import Any

import anyio
import pytest
from nats.aio.client import Client

from kvatlas.bus.subjects import alive_subject
from kvatlas.embedded import EmbeddedServer
from kvatlas.errors import SettingsError
from kvatlas.fleet.identities import TenantRefused, load_identities
from kvatlas.fleet.records import EngineEndpoint, EngineKind
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, open_store
from kvatlas_cli.doctor import examine
from tests.eventually import until
from tests.indexer.bus_publisher import BusPublisher, heartbeat, indexed, published
from tests.indexer.running_replica import answering_requests, running_replica

pytestmark = pytest.mark.anyio

TENANT = "tenant-of-nobody"
MOST_BLOCKS = 1_000


@pytest.fixture
def identities(tmp_path: Path) -> Path:
    file = tmp_path / "identities.json"
    publishers = {
        "chat": {"workers": ["good"], "addresses": ["10.0.0.0/8"]},
        "rogue": {"workers": ["rogue"], "tenants": ["acme"], "addresses": ["10.1.0.0/16"]},
    }
    file.write_text(json.dumps({"publishers": publishers}))
    return file


async def test_messages_in_another_tenant_are_refused_counted_and_named(
    nats_client: Client,
    nats: EmbeddedServer,
    valkey: EmbeddedServer,
    identities: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, rogue, unknown = (BusPublisher(nats_client, name) for name in ("good", "rogue", "unknown"))
    async with running_replica(nats.url, valkey.url, identities=identities) as replica:
        for publisher in (rogue, unknown, good):
            await publisher.start()
            await publisher.store_more()
        await until(lambda: replica.counters.poison_identity >= 2, what="both refused")
        store = await open_store(valkey.url, wait=False)
        index = await open_redis_index(store, writer=False)
        await until(lambda: replica.counters.applied >= 2, what="the good one's messages are applied")
        assert await index.digest("good")
        for worker in ("rogue", "unknown"):
            digest = await index.digest(worker)
            assert digest is None or not any(digest)
        await store.close()
    assert "worker rogue: publisher rogue may not speak for its tenant" in caplog.text or (
        "worker unknown: no publisher may speak for it" in caplog.text
    )


@pytest.mark.parametrize(
    ("worker", "changed", "line"),
    [
        ("rogue", {"tenant_id": TENANT}, "publisher rogue may not speak for its tenant"),
        ("rogue", {"advertised_url": "http://10.2.0.1:8000"}, "may not advertise 10.2.0.1:8000"),
        ("rogue", {"base_url": "http://evil.example:8000"}, "may not advertise evil.example:8000"),
        ("rogue", {"advertised_url": "http://10.1.0.1:8000/?next="}, "must be a URL of scheme, host and port alone"),
        ("unknown", {}, "no publisher may speak for it"),
    ],
)
async def test_what_an_identity_does_not_allow_never_reaches_routers(
    nats_client: Client,
    nats: EmbeddedServer,
    valkey: EmbeddedServer,
    identities: Path,
    caplog: pytest.LogCaptureFixture,
    worker: str,
    changed: dict[str, str],
    line: str,
) -> None:
    def beat(worker_id: str, **fields: str) -> bytes:
        given: dict[str, Any] = {"tenant_id": "acme", "base_url": "http://10.1.2.3:8000", **fields}
        endpoint = EngineEndpoint(
            id=worker_id, kind=EngineKind.VLLM, model_id="model", tokenizer_id="tokenizer", **given
        )
        record = heartbeat(BusPublisher(nats_client, worker_id)).model_copy(update={"endpoint": endpoint})
        return record.pack()

    async with running_replica(nats.url, valkey.url, identities=identities) as replica:
        await nats_client.publish(alive_subject(worker), beat(worker, **changed))
        await nats_client.publish(alive_subject("good"), beat("good"))
        await until(lambda: replica.counters.heartbeats_refused, what="the heartbeat is refused")
        store = await open_store(valkey.url, wait=False)
        fleet = await until(lambda: FleetStore(store).all(), what="the good worker is known")
        assert set(fleet) == {"good"} and fleet["good"].vouched
        await store.close()
    assert line in caplog.text
    assert [one for one in caplog.records if TENANT in one.getMessage() and one.levelno > logging.DEBUG] == []


async def test_routers_learn_whose_prompts_a_worker_may_get(
    nats_client: Client, nats: EmbeddedServer, valkey: EmbeddedServer, identities: Path
) -> None:
    endpoint = EngineEndpoint(
        id="rogue",
        kind=EngineKind.VLLM,
        model_id="model",
        tokenizer_id="tokenizer",
        tenant_id="acme",
        base_url="http://10.1.2.3:8000",
    )
    beat = heartbeat(BusPublisher(nats_client, "rogue")).model_copy(update={"endpoint": endpoint})
    async with running_replica(nats.url, valkey.url, identities=identities):
        await nats_client.publish(alive_subject("rogue"), beat.pack())
        store = await open_store(valkey.url, wait=False)
        fleet = await until(lambda: FleetStore(store).all(), what="the worker is known")
        assert fleet["rogue"].may_see("acme") and not fleet["rogue"].may_see("default")
        await store.close()


def test_the_tenant_of_a_refusal_is_named_at_debug_only(identities: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(TenantRefused) as refused:
        load_identities(identities, "x").check_scope("rogue", Scope("model", "tokenizer", None, TENANT))
    assert TENANT not in str(refused.value) and refused.value.tenant_id == TENANT
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG and TENANT in record.getMessage()


async def test_the_doctor_knows_whom_the_indexers_refuse(
    nats_client: Client, nats: EmbeddedServer, valkey: EmbeddedServer, identities: Path
) -> None:
    beat = heartbeat(BusPublisher(nats_client, "rogue"))
    async with running_replica(nats.url, valkey.url, identities=identities):

        async def send() -> None:
            while True:
                await nats_client.publish(alive_subject("rogue"), beat.pack())
                await anyio.sleep(0.02)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            found = await examine(
                nats.url, valkey.url, identities=load_identities(identities, "x"), listen_s=0.2, settle_s=0
            )
            tasks.cancel_scope.cancel()
    (finding,) = [one for one in found if one.check == "workers.identity"]
    assert "publisher rogue may not speak for its tenant, default" in finding.line


async def test_a_file_of_identities_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "identities.json"
    for text in (None, "{", '{"publishers": {}}', '{"publishers": {"a": {"workers": 1}}}'):
        if text is not None:
            file.write_text(text)
        with pytest.raises(SettingsError, match=rf"--identities(: can't read| is) '{file}'"):
            load_identities(file, "--identities")


async def test_a_worker_that_claims_more_blocks_than_its_identity_allows_is_left_out(
    nats: EmbeddedServer,
    nats_client: Client,
    valkey: EmbeddedServer,
    store: Store,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise it would fill the store, and an honest worker's next message would not fit."""
    file = tmp_path / "identities.json"
    publishers = {"chat": {"workers": ["honest"]}, "liar": {"workers": ["liar"], "blocks": MOST_BLOCKS}}
    file.write_text(json.dumps({"publishers": publishers}))
    honest, liar = BusPublisher(nats_client, "honest"), BusPublisher(nats_client, "liar")
    async with running_replica(nats.url, valkey.url, identities=file) as replica:
        index = await open_redis_index(store, writer=False)
        for worker in (honest, liar):
            await worker.start()
            await worker.store_more(MOST_BLOCKS)
        async with answering_requests(nats_client, [honest, liar]):

            async def holds_all() -> bool:
                return await index.claimed(["honest", "liar"]) == {"honest": MOST_BLOCKS, "liar": MOST_BLOCKS}

            await until(holds_all, what="both hold as much as is allowed")
            await honest.store_more(MOST_BLOCKS)
            await liar.store_more(1)
            await until(lambda: replica.counters.workers_too_large, what="the liar is left out")
            await until(lambda: replica._repair._doubt.doubt_of("liar") is not None, what="it is in doubt")

            async def is_applied() -> bool:
                return await indexed(index, honest) == published(honest)

            await until(is_applied, what="the honest worker has all of its blocks")
            assert "liar" not in await index.claimed(["liar"])
            assert liar.incarnation == 1, "a snapshot was requested, which would be left out too"
    line = (
        "worker liar: left out of the index for 10 minutes, since it claims 1,001 blocks, but its publisher's identity "
        "allows 1,000"
    )
    assert [one.levelno for one in caplog.records if one.getMessage() == line] == [logging.ERROR]
