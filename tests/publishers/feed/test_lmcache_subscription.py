"""The blocks of LMCache's multiprocess server get into an attached engine's ledger, over real sockets."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
import zmq.asyncio

from kvatlas.blocks.tiers import Tier
from kvatlas.embedded.free_port import free_port
from kvatlas.errors import EngineEventError
from kvatlas_publishers.engine_events import EngineBatch, EngineRemoved, EngineStored
from kvatlas_publishers.engines.lmcache import ChunkEvents
from kvatlas_publishers.feed import lmcache_subscription
from kvatlas_publishers.feed.lmcache_subscription import LMCacheSubscription
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.eventually import until
from tests.publishers.lmcache_server import LMCacheServer

pytestmark = pytest.mark.anyio

SIZE, CHUNK = 4, 16
PROMPT = list(range(100, 100 + 2 * CHUNK))


@dataclass
class Subscriber:
    """An engine's ledger and its subscription."""

    subscription: LMCacheSubscription
    ledger: Ledger

    def engine_stores(self, tokens: list[int], **fields: str) -> None:
        names = [hash(tuple(tokens[: at + SIZE])) for at in range(0, len(tokens), SIZE)]
        self.ledger.fold(EngineBatch([EngineStored(names, None, tokens, SIZE, **fields)]))  # type: ignore[arg-type]

    @property
    def in_cpu(self) -> int:
        """Number of blocks announced in the CPU tier."""
        return len({value for _, tier, _, value in self.ledger.announced() if tier is Tier.CPU_DRAM})

    async def holds(self, blocks: int) -> None:
        await until(lambda: self.in_cpu == blocks, what=f"{blocks} blocks are held in the CPU tier")


@asynccontextmanager
async def subscribed(endpoint: str, ledger: Ledger | None = None) -> AsyncIterator[Subscriber]:
    own = ledger or Ledger(LedgerSettings("model", "model"))
    context = zmq.asyncio.Context()
    subscription = LMCacheSubscription(endpoint, "model", "w", lambda: own, on_batch=lambda batch: own.fold(batch))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(subscription.run, context)
        found = Subscriber(subscription, own)
        if ledger is None:
            found.engine_stores([1] * SIZE)  # this shows its block size
        yield found
        tasks.cancel_scope.cancel()
    context.destroy(linger=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_subscription, "RETRY_S", 0.01)
    monkeypatch.setattr(lmcache_subscription, "LOOK_S", 0.01)
    monkeypatch.setattr(lmcache_subscription, "PING_S", 0.05)


async def test_chunks_are_held_as_the_engines_blocks_and_gone_when_they_are_evicted() -> None:
    async with LMCacheServer() as server, subscribed(server.endpoint) as one:
        await server.store(b"a", PROMPT[:CHUNK])
        await server.store(b"b", PROMPT[CHUNK:], b"a")
        await server.store(b"a", PROMPT[:CHUNK])  # reported again: it is there once
        await server.store(b"x", PROMPT[:CHUNK], model="other")
        await one.holds(8)
        await server.evict(b"b", b"unknown")
        await one.holds(4)
        await server.evict(b"a")
        await one.holds(0)
        await until(lambda: server.pings >= 2, what="the subscription is kept alive")
        assert len(server.asked) == 1 and server.asked[0][1:] == ["model", 0, 1024]


async def test_what_the_server_lost_is_withdrawn() -> None:
    async with LMCacheServer() as server, subscribed(server.endpoint) as one:
        await server.store(b"a", PROMPT[:CHUNK])
        await one.holds(4)
        await server.lose()
        await one.holds(0)
        await server.store(b"a", PROMPT[:CHUNK])
        await one.holds(4)


async def test_another_server_at_the_same_address_holds_what_it_says_itself() -> None:
    port = free_port()
    async with subscribed(LMCacheServer(port).endpoint) as one:
        async with LMCacheServer(port) as server:
            await server.store(b"a", PROMPT[:CHUNK])
            await one.holds(4)
        await one.holds(0)
        async with LMCacheServer(port, incarnation=2) as server:
            await server.store(b"b", PROMPT)
            await one.holds(8)


async def test_a_subscription_that_ended_is_begun_again() -> None:
    async with LMCacheServer() as server, subscribed(server.endpoint) as one:
        await server.store(b"a", PROMPT[:CHUNK])
        await one.holds(4)
        await server.end_subscriptions()
        await until(lambda: len(server.asked) == 2, what="it is subscribed to again")
        await one.holds(4)


async def test_an_emptied_ledger_is_told_all_again() -> None:
    async with LMCacheServer() as server, subscribed(server.endpoint) as one:
        await server.store(b"a", PROMPT[:CHUNK])
        await one.holds(4)
        one.ledger.empty()
        one.engine_stores([1] * SIZE)
        one.subscription.restart()
        await one.holds(4)


async def test_chunks_of_a_saved_ledger_are_withdrawn_before_the_server_is_asked() -> None:
    async with LMCacheServer() as server:
        async with subscribed(server.endpoint) as one:
            await server.store(b"a", PROMPT[:CHUNK])
            await server.store(b"b", PROMPT[CHUNK:], b"a")
            await one.holds(8)
        await server.evict(b"b")
        again = Ledger.load(one.ledger.dump(), one.ledger.settings)
        async with subscribed(server.endpoint, again) as two:
            await two.holds(4)


async def test_of_an_engine_with_adapters_or_salts_nothing_is_believed() -> None:
    async with LMCacheServer() as server, subscribed(server.endpoint) as one:
        await server.store(b"a", PROMPT[:CHUNK])
        await one.holds(4)
        one.engine_stores([2] * SIZE, adapter="sql")
        assert one.in_cpu == 0
        await server.store(b"b", PROMPT)
        await server.evict(b"a", b"b")
        await until(lambda: not one.subscription._chunks.held, what="all is read")
        assert one.in_cpu == 0


async def test_a_server_that_records_no_events_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with LMCacheServer() as server:
        server.enabled = False
        async with subscribed(server.endpoint):
            await until(lambda: len(server.asked) >= 3, what="it is asked again")
    [line] = [one for one in caplog.messages if "LMCache" in one]
    assert f"LMCache at {server.endpoint}: the server records no events (its --kv-event-log-size is 0" in line


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"\x90",
        b"\x81\xa6events\x90",
        b"\x83\xa6events\x91\x05\xabincarnation\x01\xa7enabled\xc3",
    ],
)
async def test_a_batch_that_can_not_be_read_is_refused(payload: bytes) -> None:
    with pytest.raises(EngineEventError):
        ChunkEvents().decode(payload)


async def test_only_names_of_lmcaches_chunks_are_taken_from_a_ledger() -> None:
    events = ChunkEvents([5, b"other", b"lmcache\x00a"])
    assert events.withdraw() == [EngineRemoved([b"lmcache\x00a"], Tier.CPU_DRAM)] and not events.withdraw()
