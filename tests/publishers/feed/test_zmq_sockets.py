"""All our sockets work on IPv6 as on IPv4: each is opened on ::1."""

import socket

import anyio
import pytest
import zmq
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engines.discovery import discover
from kvatlas_publishers.feed.replay import request_replay
from kvatlas_publishers.feed.zmq_sockets import open_socket
from tests.eventually import until
from tests.http_client import http_client
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.feed.test_lmcache_subscription import CHUNK, PROMPT, SIZE, subscribed
from tests.publishers.lmcache_server import LMCacheServer
from tests.publishers.sidecars import assert_published, ledger_of, sidecar
from tests.simulator.running_engine import running_engine

LOOPBACK = "[::1]"

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("host", ["127.0.0.1", LOOPBACK])
async def test_a_lost_batch_is_replayed_on_either_family(nats_client: Client, nats_url: str, host: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    port = free_port()
    async with (
        FakeEngine(host=host) as engine,
        sidecar(engine, nats_url, status_port=port, status_host=host.strip("[]")) as publisher,
    ):
        await engine.send(*payloads[:50])
        await until(lambda: publisher.counters.engine_batches == 50, what="the batches before the gap are taken")
        engine.lose(payloads[50])
        await engine.send(*payloads[51:])
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps_filled == 1
        async with http_client() as client:
            assert (await client.get(f"http://{host}:{port}/readyz")).status_code == 200


async def test_a_bound_event_socket_takes_both_families(nats_url: str) -> None:
    """The engine connects to it."""
    context = zmq.asyncio.Context()
    bound = open_socket(context, zmq.SUB)
    bound.setsockopt(zmq.SUBSCRIBE, b"")
    port = bound.bind_to_random_port("tcp://*")
    for host in ("127.0.0.1", LOOPBACK):
        engine = open_socket(context, zmq.PUB)
        engine.connect(f"tcp://{host}:{port}")

        async def heard(engine: zmq.asyncio.Socket = engine) -> bool:
            await engine.send(b"batch")
            return bool(await bound.poll(50))

        with anyio.fail_after(20):
            while not await heard():
                pass
        engine.close()
        while await bound.poll(0):
            await bound.recv()
    context.destroy(linger=0)


async def test_lmcache_is_read_on_ipv6() -> None:
    async with LMCacheServer(host=LOOPBACK) as server:
        assert LOOPBACK in server.endpoint
        async with subscribed(server.endpoint) as engine:
            engine.engine_stores(PROMPT)
            await server.store(b"one", PROMPT[:CHUNK])
            await engine.holds(CHUNK // SIZE)


async def test_a_simulated_engine_serves_on_ipv6() -> None:
    at = f"tcp://{LOOPBACK}:0"
    async with running_engine(host="::1", endpoint=at, replay_endpoint=at) as (addresses, client):
        assert (await client.post("/v1/completions", json={"prompt": [*range(9)], "max_tokens": 1})).is_success
        assert addresses.replay_endpoint is not None
        context = zmq.asyncio.Context()
        replay = await request_replay(context, addresses.replay_endpoint, 0)
        context.destroy(linger=0)
        assert replay.complete and replay.batches
        offer = await discover(addresses.base_url)
        assert [one.endpoint for one in offer.sources] == [addresses.endpoint]


def test_the_machine_has_ipv6() -> None:
    """Otherwise the tests above prove nothing."""
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
        probe.bind(("::1", 0))
