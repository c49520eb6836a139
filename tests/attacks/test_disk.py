"""Attacks on disks: a publisher that never stops writing, and a client that tries to fill the router's log."""

from contextlib import AsyncExitStack
from pathlib import Path
from time import time_ns
from urllib.parse import quote

import pytest

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import DEAD_STREAM, STREAM
from kvatlas.store.connection import Store
from tests.attacks.attacked_fleet import attacked_fleet, attacked_servers
from tests.attacks.guarded_router import ACME, CHAT, COMPLETIONS, bearer, completion, guarded_router, router_process
from tests.attacks.guarded_router import tenants_fleet as fleet_of_tenants
from tests.eventually import until
from tests.http_client import http_client
from tests.indexer.bus_publisher import BusPublisher

pytestmark = pytest.mark.anyio

STREAM_BYTES = 4 << 20
MESSAGE_BYTES = 256 << 10
LINE_BYTES = 1_000
"""The most that one request may write to the log."""


@pytest.mark.parametrize("users", [True, False], ids=["with users", "defaults"])
async def test_no_publisher_fills_the_disk_of_nats(tmp_path: Path, users: bool) -> None:
    """It writes 16 times what the stream may hold, and each message is refused, so it is kept for inspection."""
    with attacked_servers(tmp_path, users=users) as servers:
        async with attacked_fleet(servers, stream_max_bytes=STREAM_BYTES, stream_storage="file") as fleet:
            rogue = await connect_nats(NatsAccess(servers.nats_url("rogue")), name="rogue", wait=False)
            auditor = await connect_nats(NatsAccess(servers.nats_url("auditor")), name="auditor", wait=False)
            try:
                own = BusPublisher(rogue, "rogue", time_ns())
                for _ in range(16 * STREAM_BYTES // MESSAGE_BYTES):
                    await rogue.publish(own.subject, b"\x91" * MESSAGE_BYTES)
                await rogue.flush()
                await until(lambda: fleet.replica.counters.poison > 16, what="messages are refused")
                for name, most in ((STREAM, STREAM_BYTES), (DEAD_STREAM, 64 << 20)):
                    found = await auditor.jetstream().stream_info(name)
                    assert found.config.max_bytes == most and found.state.bytes <= most
                await fleet.check()
            finally:
                await rogue.close()
                await auditor.close()


@pytest.mark.parametrize("guarded", [True, False], ids=["everything on", "defaults"])
async def test_a_request_writes_one_short_line_into_the_log(
    store: Store, valkey_url: str, tmp_path: Path, guarded: bool
) -> None:
    long = "x" * 50_000
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(fleet_of_tenants(store))
        started = guarded_router(valkey_url, tmp_path) if guarded else router_process(valkey_url)
        router = await stack.enter_async_context(started)
        client = await stack.enter_async_context(http_client(base_url=router.url, timeout=60))
        requests = 0
        for key in (ACME, "wrong", long):
            for path, body in (
                ("/v1/" + quote(long), {}),
                (COMPLETIONS, completion(model=long)),
                (COMPLETIONS, completion(user=long, cache_salt=long)),
                (COMPLETIONS, {long: long}),
                (CHAT, {"model": long, "messages": [{"role": long, "content": long}]}),
                (CHAT, {"model": "m", "messages": long, "tools": [long], "response_format": {long: long}}),
            ):
                for _ in range(4):
                    await client.post(path, json=body, headers=bearer(key))
                    requests += 1
                await client.post(path, content=long.encode(), headers={**bearer(key), "content-type": long[:8_000]})
                requests += 1
        lines = await router.log()
        assert sum(map(len, lines)) <= requests * LINE_BYTES, max(lines, key=len)[:2_000]
