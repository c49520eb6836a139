"""Faults in a fleet that make alerts fire, and their repair."""

import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from itertools import count

import anyio
import httpx
import msgpack
import nats
from redis.asyncio import Redis

from kvatlas.bus.subjects import alive_subject, events_subject
from kvatlas.embedded.async_servers import EmbeddedServer
from kvatlas.fleet.records import EngineState
from tests.alerts.fleet import Fleet
from tests.alerts.odd_engine import OddEngine
from tests.eventually import until
from tests.http_client import http_client
from tests.indexer.bus_publisher import BusPublisher, heartbeat
from tests.publishers.fake_engine import FakeEngine


@asynccontextmanager
async def no_indexer(fleet: Fleet) -> AsyncIterator[None]:
    await fleet.indexer.stop()
    yield
    fleet.indexer.start()
    await fleet.indexer.ready()


@asynccontextmanager
async def store_hangs(fleet: Fleet) -> AsyncIterator[None]:
    fleet.valkey.pause()
    yield
    fleet.valkey.resume()


@asynccontextmanager
async def store_is_nearly_full(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        used = int((await store.info("memory"))["used_memory"])
        await store.config_set("maxmemory", int(used * 1.08))
        yield
        await store.config_set("maxmemory", 0)


@asynccontextmanager
async def store_is_full(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        await store.config_set("maxmemory", 1_000_000)
        yield
        await store.config_set("maxmemory", 0)


@asynccontextmanager
async def store_evicts(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        await store.config_set("maxmemory-policy", "allkeys-lru")
        yield
        await store.config_set("maxmemory-policy", "noeviction")


@asynccontextmanager
async def bus_hangs(fleet: Fleet) -> AsyncIterator[None]:
    fleet.nats.pause()
    yield
    fleet.nats.resume()


@asynccontextmanager
async def worker_in_doubt(fleet: Fleet) -> AsyncIterator[None]:
    """It reports messages that the index never got, and answers no request."""
    client = await nats.connect(fleet.nats.url)
    ghost = BusPublisher(client, "ghost", incarnation=7)

    async def beat() -> None:
        while True:
            await ghost.beat(acked_seq=5)
            await anyio.sleep(0.5)  # its pace

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        yield
        group.cancel_scope.cancel()
    leaves = heartbeat(ghost, acked_seq=5).model_copy(update={"state": EngineState.DRAINING})
    await client.publish(alive_subject("ghost"), leaves.pack())  # otherwise it is missed for an hour
    await client.close()


@asynccontextmanager
async def sidecar_hangs(fleet: Fleet) -> AsyncIterator[None]:
    fleet.sidecars[0].pause()
    yield
    fleet.sidecars[0].resume()


@asynccontextmanager
async def messages_of_something_else(fleet: Fleet) -> AsyncIterator[None]:
    client = await nats.connect(fleet.nats.url)
    await client.jetstream().publish(events_subject("stranger", 64), b"no message of ours")
    yield
    await client.close()


@asynccontextmanager
async def wrong_event_port(fleet: Fleet) -> AsyncIterator[None]:
    fleet.wrong_sidecar.start()
    await fleet.wrong_sidecar.ready()
    yield
    await fleet.wrong_sidecar.stop()


@asynccontextmanager
async def sent_events(fleet: Fleet, payload: Callable[[int], bytes], *, lost: int = 0) -> AsyncIterator[None]:
    """Batches on the wrong sidecar's event socket, made from their number. `lost`: how many before each are lost, even for
    replay."""
    async with FakeEngine(ports=fleet.wrong_ports, buffer=0) as engine, anyio.create_task_group() as group:

        async def send() -> None:
            for number in count():
                engine.next_seq += lost
                await engine.send(payload(number))
                await anyio.sleep(0.5 if lost else 0.2)  # a paced feed

        fleet.wrong_sidecar.start()
        await fleet.wrong_sidecar.ready()
        await engine.subscribed()
        group.start_soon(send)
        yield
        group.cancel_scope.cancel()
    await fleet.wrong_sidecar.stop()


def events_of_something_else(fleet: Fleet) -> AbstractAsyncContextManager[None]:
    return sent_events(fleet, lambda _: b"no batch of events")


def events_are_lost(fleet: Fleet) -> AbstractAsyncContextManager[None]:
    return sent_events(fleet, lambda _: msgpack.packb([1.0, [], 0]), lost=3)


def tokens_beyond_32_bits(fleet: Fleet) -> AbstractAsyncContextManager[None]:
    def batch(number: int) -> bytes:
        stored = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": None, "medium": "GPU"}
        return msgpack.packb([1.0, [{**stored, "token_ids": [1 << 40] * 16, "block_size": 16, "lora_id": None}], 0])

    return sent_events(fleet, batch)


@asynccontextmanager
async def _stuttering(server: EmbeddedServer, stands_s: float, runs_s: float) -> AsyncIterator[None]:
    async def stutter() -> None:
        while True:
            server.pause()
            await anyio.sleep(stands_s)  # its stutter
            server.resume()
            await anyio.sleep(runs_s)  # its stutter

    async with anyio.create_task_group() as group:
        group.start_soon(stutter)
        yield
        group.cancel_scope.cancel()
    server.resume()


def bus_stutters(fleet: Fleet) -> AbstractAsyncContextManager[None]:
    """Events arrive late; every part can be scraped."""
    return _stuttering(fleet.nats, 1.7, 1.3)


def store_stutters(fleet: Fleet) -> AbstractAsyncContextManager[None]:
    """It answers late, but in time for a decision."""
    return _stuttering(fleet.valkey, 0.1, 0.05)


@asynccontextmanager
async def block_is_deleted(fleet: Fleet) -> AsyncIterator[None]:
    async with Redis.from_url(fleet.valkey.url) as store:
        keys: list[bytes] = []

        async def are_indexed() -> bool:
            keys[:] = [key async for key in store.scan_iter(match="kva:{s0}:blocks:*")]
            return bool(keys)

        await until(are_indexed, deadline_s=120, what="blocks are in the index")
        fields = await store.hkeys(keys[0])
        await store.hdel(keys[0], fields[0])
        yield


@asynccontextmanager
async def engines_die(fleet: Fleet) -> AsyncIterator[None]:
    for engine in fleet.engines:
        engine.kill()
    yield
    for engine in fleet.engines:
        engine.start()
    for engine in fleet.engines:
        await engine.ready()


@asynccontextmanager
async def odd_engine_joins(fleet: Fleet, *, alone: bool) -> AsyncIterator[OddEngine]:
    """`alone`: the others are away meanwhile, so it gets all requests."""
    async with AsyncExitStack() as stack:
        fleet.odd.behave()
        fleet.odd_sidecar.start()
        stack.push_async_callback(fleet.odd_sidecar.stop)
        await fleet.odd_sidecar.ready()
        if alone:
            await stack.enter_async_context(engines_die(fleet))
        yield fleet.odd
        fleet.odd.behave()


@asynccontextmanager
async def engine_answers_500(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=False) as odd:
        odd.status, fleet.fresh = 500, True
        yield
        odd.behave()
        async with http_client(base_url=fleet.router_url, timeout=10) as client:

            async def is_readmitted() -> bool:
                try:
                    return not (await client.get("/status")).json()["ejected"]
                except httpx.HTTPError:  # a busy machine
                    return False

            await until(is_readmitted, deadline_s=120, what="the engine is readmitted")
        fleet.fresh = False


@asynccontextmanager
async def engine_hangs(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=False) as odd:
        odd.hangs, fleet.fresh = True, True
        yield
        fleet.fresh = False


@asynccontextmanager
async def engine_reports_wrong_cached_tokens(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=True) as odd:
        odd.cached_tokens = 64
        yield


@asynccontextmanager
async def engine_reports_no_cached_tokens(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=True) as odd:
        odd.cached_tokens = None
        yield


@asynccontextmanager
async def engine_counts_other_tokens(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=True) as odd:
        odd.more_tokens = 3
        yield


@asynccontextmanager
async def engine_tokenizes_late(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=True) as odd:
        odd.tokenize_s = 1.0
        yield


@asynccontextmanager
async def engine_is_full(fleet: Fleet) -> AsyncIterator[None]:
    async with odd_engine_joins(fleet, alone=True) as odd:
        odd.full = True
        yield


@asynccontextmanager
async def clients_give_up(fleet: Fleet) -> AsyncIterator[None]:
    async def leave(client: httpx.AsyncClient) -> None:
        body = {"model": "m", "prompt": "A long story, please.", "max_tokens": 2_000, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_bytes(), b"")

    async def keep_leaving() -> None:
        async with http_client(base_url=fleet.router_url, timeout=10) as client:
            while True:
                with suppress(httpx.HTTPError):  # on a busy machine it gives up before the answer begins
                    await leave(client)
                await anyio.sleep(0.2)  # a paced load

    async with anyio.create_task_group() as group:
        group.start_soon(keep_leaving)
        yield
        group.cancel_scope.cancel()


@asynccontextmanager
async def certificate_expires(fleet: Fleet) -> AsyncIterator[None]:
    fleet.tls_router.start()
    await fleet.tls_router.ready()
    yield
    await fleet.tls_router.stop()


@asynccontextmanager
async def few_descriptors(fleet: Fleet) -> AsyncIterator[None]:
    before = resource.prlimit(fleet.router.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(fleet.router.pid, resource.RLIMIT_NOFILE, (48, before[1]))
    yield
    resource.prlimit(fleet.router.pid, resource.RLIMIT_NOFILE, before)


Cause = Callable[[Fleet], AbstractAsyncContextManager[None]]

CAUSES: Mapping[str, tuple[Cause, set[str]]] = {
    "no_indexer": (no_indexer, {"KvatlasNoIndexer"}),
    "store_hangs": (
        store_hangs,
        {
            "KvatlasStoreFails",
            "KvatlasPartitionsWithoutOwner",
            "KvatlasDecisionsWithoutIndex",
        },
    ),
    "store_stutters": (store_stutters, {"KvatlasDecisionsSlow"}),
    "store_is_nearly_full": (store_is_nearly_full, {"KvatlasStoreNearlyFull"}),
    "store_is_full": (store_is_full, {"KvatlasStoreOutOfMemory"}),
    "store_evicts": (store_evicts, {"KvatlasStoreEvicts"}),
    "bus_hangs": (bus_hangs, {"KvatlasPublishingBlocked"}),
    "worker_in_doubt": (worker_in_doubt, {"KvatlasWorkersInDoubt"}),
    "sidecar_hangs": (sidecar_hangs, {"KvatlasWorkersLost"}),
    "messages_of_something_else": (messages_of_something_else, {"KvatlasMessagesRefused"}),
    "wrong_event_port": (wrong_event_port, {"KvatlasFeedDisconnected"}),
    "events_of_something_else": (events_of_something_else, {"KvatlasUndecodableEvents"}),
    "events_are_lost": (events_are_lost, {"KvatlasFeedStartsOver"}),
    "tokens_beyond_32_bits": (tokens_beyond_32_bits, {"KvatlasBlocksNotPublishable", "KvatlasFeedLeftOut"}),
    "bus_stutters": (bus_stutters, {"KvatlasIndexLate"}),
    "block_is_deleted": (block_is_deleted, {"KvatlasIndexDamaged"}),
    "engines_die": (engines_die, {"KvatlasRequestsFail", "KvatlasNoWorkers", "KvatlasPickerRefuses"}),
    "engine_is_full": (engine_is_full, {"KvatlasRequestsWait", "KvatlasRequestsRefused"}),
    "clients_give_up": (clients_give_up, {"KvatlasClientsGaveUp"}),
    "certificate_expires": (certificate_expires, {"KvatlasCertificateExpires"}),
    "few_descriptors": (few_descriptors, {"KvatlasDescriptorsShort"}),
    "engine_answers_500": (engine_answers_500, {"KvatlasWorkersEjected"}),
    "engine_hangs": (engine_hangs, {"KvatlasEngineStalled"}),
    "engine_reports_wrong_cached_tokens": (engine_reports_wrong_cached_tokens, {"KvatlasPredictionsWrong"}),
    "engine_reports_no_cached_tokens": (engine_reports_no_cached_tokens, {"KvatlasCachedTokensNotReported"}),
    "engine_counts_other_tokens": (engine_counts_other_tokens, {"KvatlasTokenizerWrong"}),
    "engine_tokenizes_late": (engine_tokenizes_late, {"KvatlasTokenIdsMissing"}),
}
"""Each cause, and the alerts that it makes fire; others may fire as well."""
