"""The publisher of a shared store: what it believes, what it keeps across its own restart, and when it forgets."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

import anyio
import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import shared_store_subject
from kvatlas.fleet.records import EngineKind, Heartbeat
from kvatlas.identity import Scope
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engine_events import EngineBatch, EngineStored
from kvatlas_publishers.feed import lmcache_subscription
from kvatlas_publishers.ledger.connectors.shared_store_notice import (
    AdapterGone,
    StoreChange,
    StoreCleared,
    StoredInStore,
    encode,
)
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from kvatlas_publishers.shared_store import process
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.publishers.fake_engine import FakeEngine
from tests.publishers.lmcache_server import LMCacheServer
from tests.publishers.published_stream import read_stream

pytestmark = pytest.mark.anyio

SIZE = 4
PROMPT = list(range(100, 100 + 8 * SIZE))
CHAIN = extend_chain(PROMPT, SIZE)
SCOPE = Scope("model", "model")

Told = Callable[..., Any]


@pytest.fixture
def told(nats_client: Client) -> Told:
    """Sends notices to the store as a writer's publisher does."""

    async def tell(
        *changes: StoreChange, block_size: int = SIZE, keys: bool = False, block_bytes: int = 0, writer: str = "w1"
    ) -> None:
        for payload in encode(block_size, keys, changes, block_bytes=block_bytes):
            await nats_client.publish(shared_store_subject("pool", writer), payload)
        await nats_client.flush()

    return tell


@asynccontextmanager
async def shared_store(nats_url: str, **fields: Any) -> AsyncIterator[Publisher]:
    settings = PublishSettings(
        **{
            "engine": EngineKind.STORE,
            "worker_id": "pool",
            "model_id": "model",
            "block_size": SIZE,
            "store_ttl_s": 600,
            "nats_url": nats_url,
            **fields,
        }
    )
    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        tasks.start_soon(run_sidecar, settings, started.extend)
        yield (await until(lambda: started, what="the store is published"))[0]
        tasks.cancel_scope.cancel()


def chain(blocks: int, scope: Scope = SCOPE) -> StoredInStore:
    return StoredInStore(scope, CHAIN[: 8 * blocks], None)


def blocks_of(ledger: Ledger, tier: Tier = Tier.OBJECT_STORE) -> int:
    return len({(scope, value) for scope, at, _, value in ledger.announced() if at is tier})


async def holds(publisher: Publisher, blocks: int, tier: Tier = Tier.OBJECT_STORE) -> None:
    await until(lambda: blocks_of(publisher.ledger, tier) == blocks, what=f"{blocks} blocks are held")


async def test_it_is_announced_as_a_store_with_how_fast_it_is_read(
    nats_client: Client, nats_url: str, told: Told
) -> None:
    beats = await nats_client.subscribe("kvatlas.alive.pool")
    async with shared_store(nats_url, read_us_per_mib=195) as publisher:
        await told(chain(8))
        await holds(publisher, 8)
        await publisher.flush()
        endpoint = Heartbeat.unpack((await beats.next_msg(10)).data).endpoint
        assert endpoint.is_store and (endpoint.read_setup_us, endpoint.read_us_per_mib) == (None, 195)
        assert endpoint.block_size == SIZE
        published = await read_stream(nats_client)
        assert await published.index.digest("pool") == publisher.ledger.digest_words
        assert await published.residencies("pool") == 8


@pytest.mark.parametrize(("set_bytes", "counted"), [(0, 4_096), (512, 512)])
async def test_its_blocks_have_the_bytes_that_most_writers_give_or_that_are_set(
    nats_client: Client, nats_url: str, told: Told, set_bytes: int, counted: int
) -> None:
    beats = await nats_client.subscribe("kvatlas.alive.pool")
    async with shared_store(nats_url, block_bytes=set_bytes) as publisher:
        for writer, block_bytes in (("w1", 4_096), ("w2", 1 << 30), ("w3", 4_096), ("w2", 1 << 29)):
            await told(chain(8), block_bytes=block_bytes, writer=writer)
        await until(lambda: publisher.counters.store_notices == 4, what="all notices are read")
        await holds(publisher, 8)
        await publisher.flush()
        assert {use.block_bytes for use in publisher.ledger.uses.values()} == {counted}
        while Heartbeat.unpack((await beats.next_msg(10)).data).endpoint.block_bytes != counted:
            pass
        published = await read_stream(nats_client)
        assert {one.bytes async for one in published.index.snapshot("pool")} == {counted}


@pytest.mark.parametrize(
    ("change", "fields", "why"),
    [
        (chain(1, Scope("other", "model")), {}, "the store is of model/model"),
        (chain(1, Scope("model", "model", None, "acme")), {}, "another tenant than the store's"),
        (chain(1), {"block_size": 16}, "blocks of 16 tokens; the store's have 4"),
    ],
)
async def test_what_is_not_the_stores_is_refused_and_counted(
    nats_client: Client,
    nats_url: str,
    told: Told,
    caplog: pytest.LogCaptureFixture,
    change: StoreChange,
    fields: dict[str, int],
    why: str,
) -> None:
    with caplog.at_level(logging.WARNING, "kvatlas.publisher"):
        async with shared_store(nats_url) as publisher:
            await told(change, **fields)
            await until(lambda: publisher.counters.store_notices_refused, what="the notice is refused")
            await told(chain(2))
            await holds(publisher, 2)
    assert why in caplog.text and "notice of worker w1 refused" in caplog.text


async def test_damaged_notices_are_refused_and_the_next_one_is_read(
    nats_client: Client, nats_url: str, told: Told
) -> None:
    async with shared_store(nats_url) as publisher:
        await nats_client.publish(shared_store_subject("pool", "w1"), b"\xff")
        await until(lambda: publisher.counters.store_notices_refused == 1, what="the notice is refused")
        await told(chain(2))
        await holds(publisher, 2)


async def test_a_store_of_all_tenants_keeps_their_blocks_apart(nats_client: Client, nats_url: str, told: Told) -> None:
    acme = Scope("model", "model", None, "acme")
    async with shared_store(nats_url, salt_is_tenant=True) as publisher:
        await told(chain(3), chain(2, acme))
        await holds(publisher, 5)
        assert {scope for scope, *_ in publisher.ledger.announced()} == {SCOPE.scope_id, acme.scope_id}


async def test_new_weights_of_a_writer_clear_it_and_an_adapter_from_elsewhere_takes_its_blocks_along(
    nats_client: Client, nats_url: str, told: Told
) -> None:
    async with shared_store(nats_url) as publisher:
        await told(chain(3), chain(2, Scope("model", "model", "sql")))
        await holds(publisher, 5)
        await told(AdapterGone("sql"))
        await holds(publisher, 3)
        await told(StoreCleared())
        await holds(publisher, 0)
        await told(chain(1))
        await holds(publisher, 1)


async def test_a_restarted_store_goes_on_with_its_blocks_at_their_age(
    nats_client: Client, nats_url: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shared_store(nats_url, state_dir=tmp_path) as publisher:
        await told(chain(2))
        await holds(publisher, 2)
    async with shared_store(nats_url, state_dir=tmp_path) as publisher:
        assert blocks_of(publisher.ledger) == 2
        await told(StoredInStore(SCOPE, CHAIN[16:24], CHAIN[8:16]))
        await holds(publisher, 3)
    monkeypatch.setattr(process, "time", lambda: time() + 450)  # three quarters of the time to live
    async with shared_store(nats_url, state_dir=tmp_path) as publisher:
        assert blocks_of(publisher.ledger) == 3
        publisher.record(EngineBatch(publisher.ledger.expire()))
        await holds(publisher, 0)


async def test_what_was_cleared_does_not_come_back_with_the_saved_state(
    nats_client: Client, nats_url: str, told: Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill, nothing is saved at the end."""
    async with shared_store(nats_url, state_dir=tmp_path) as publisher:
        await told(chain(2))
        await holds(publisher, 2)
    monkeypatch.setattr(process.SharedStore, "_save", lambda *_: None)
    async with shared_store(nats_url, state_dir=tmp_path) as publisher:
        assert blocks_of(publisher.ledger) == 2
        publisher.clear()
        await until(lambda: not (tmp_path / "pool.state").exists(), what="the saved state is deleted")
    async with shared_store(nats_url, state_dir=tmp_path) as publisher:
        assert blocks_of(publisher.ledger) == 0


async def test_lmcaches_server_is_a_store_whose_tokens_count_until_a_writer_uses_keys(
    nats_client: Client, nats_url: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache_subscription, "LOOK_S", 0.01)
    async with (
        LMCacheServer() as server,
        shared_store(nats_url, store_ttl_s=0, lmcache_endpoint=server.endpoint) as publisher,
    ):
        await server.store(b"a", PROMPT[: 4 * SIZE])
        await server.store(b"b", PROMPT[4 * SIZE :], b"a")
        await holds(publisher, 8, Tier.CPU_DRAM)
        await server.evict(b"b")
        await holds(publisher, 4, Tier.CPU_DRAM)
        await told(keys=True)
        await holds(publisher, 0, Tier.CPU_DRAM)


async def test_a_writers_publisher_tells_the_store_and_claims_nothing_itself(
    nats_client: Client, nats_url: str
) -> None:
    settings = PublisherSettings(
        worker_id="w1", model_id="model", block_size=SIZE, shared_store="pool", block_bytes=640
    )
    async with shared_store(nats_url) as store, Publisher(settings, nats=nats_client) as writer:
        await writer.stored(
            EngineStored(
                [1, 2, 3], None, PROMPT[: 3 * SIZE], SIZE, Tier.OBJECT_STORE, offloaded=True, removal_told=False
            )
        )
        await holds(store, 3)
        assert store.ledger.sizes.block_bytes == 640
        assert writer.ledger.announced_blocks == 0 and writer.ledger.counters.removal_untold == 0
        writer.clear()
        await holds(store, 0)


async def test_what_mooncakes_master_evicts_is_gone_before_its_time(
    nats_client: Client, nats_url: str, told: Told
) -> None:
    """Its objects are named by sequence hashes; engines' publishers report which blocks these are."""

    def event(kind: str, *blocks: int, **changed: Any) -> dict[str, Any]:
        hashes = [int.from_bytes(CHAIN[8 * at : 8 * at + 8], "little") for at in blocks]
        return {"event_type": kind, "tenant_id": "default", "medium": "cpu", "seq_hashes": hashes, **changed}

    def batch(*events: dict[str, Any]) -> bytes:
        return msgpack.packb([1_790_000_000_000, list(events), 0])

    async with FakeEngine() as master, shared_store(nats_url, mooncake_endpoint=master.endpoint) as publisher:
        await master.subscribed()
        await told(chain(8))
        await holds(publisher, 8)
        await master.send(batch(event("removed", 7), event("removed", 6, model_name="another")))
        await holds(publisher, 7)
        await master.send(batch(event("stored", 7), event("removed", 7, tenant_id="acme")))
        await holds(publisher, 8)
        await master.send(batch(event("removed", 3)))
        await holds(publisher, 3)  # nothing counts after a hole
        master.next_seq += 1
        await master.send(batch(event("stored", 3)))
        await holds(publisher, 0)  # the master has no replay, so what it evicted meanwhile is unknown
