"""After a router process is killed mid-answer, its bookings are free again, as is its request's place at the engine."""

import asyncio
import struct

import pytest

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import pool_id
from kvatlas.reservations.redis_calls import pool_keys
from kvatlas.store.connection import Store
from tests.end_to_end.processes import environment, kvatlas_command, line_with
from tests.eventually import until
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, running_fleet
from tests.router.proxy.test_proxy import PROMPT, requests_are

pytestmark = pytest.mark.anyio

SLOW = {"speed_up": 1, "decode_step_us": 50_000}


async def test_a_killed_router_frees_its_bookings(store: Store, valkey_url: str) -> None:
    _, load, reservations, *_ = pool_keys(pool_id(MODEL, MODEL))
    async with running_fleet(store, {"w1": SLOW}) as fleet:
        words = ["router", "--redis-url", valkey_url, "--port", "0", "--tokenizer", "none"]
        process = await asyncio.create_subprocess_exec(
            *kvatlas_command(*words), stderr=asyncio.subprocess.PIPE, env=environment()
        )
        try:
            said = await line_with("router at", process.stderr)
            url = next(word for word in said.split() if word.startswith("http://")).rstrip(";")
            async with http_client(base_url=url, timeout=60) as client:
                body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.aiter_lines()
                    assert (await anext(lines)).startswith("data: ")
                    assert await store.client.hlen(reservations) == 1
                    process.kill()
                    await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

        async def is_free() -> bool:
            await fleet.report("w1")  # as the indexer does every second
            booked_running = struct.unpack_from(">10d", await store.client.hget(load, "w1"))[7]
            return not await store.client.hlen(reservations) and booked_running == 0

        await until(is_free, what="the killed router's booking is gone")
        await until(lambda: requests_are(fleet.clients["w1"], "running", 0), what="the engine gave the request up")
        assert (await FleetStore(store).pool(pool_id(MODEL, MODEL)))["w1"].routable
