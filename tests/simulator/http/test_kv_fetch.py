"""A simulated engine fetches KV from another one, with the request formats of real engines."""

from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvatlas_simulator.cache.block_hash import Namespace, SeededBlockHasher
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 401))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 1}
HASHES: list[int] = []
for _at in range(0, 100, 4):
    HASHES.append(SeededBlockHasher(7)(HASHES[-1] if HASHES else None, PROMPT[_at : _at + 4], Namespace()))


def p2p(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    source = {"kv_request_id": "r", "remote_host": parts.hostname, "remote_port": parts.port}
    return {"kv_transfer_params": {"remote_kv_source": source}}


def kvcr(url: str, hashes: list[int]) -> dict[str, Any]:
    payload = {"source_control_endpoint": url.replace("http://", "tcp://"), "block_hashes": hashes}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [action]}}


async def cached(client: httpx.AsyncClient, **fields: Any) -> int:
    answer = await client.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_what_the_named_source_holds_is_not_computed() -> None:
    async with AsyncExitStack() as stack:

        async def start(**changed: Any) -> tuple[str, httpx.AsyncClient]:
            settings = {"kv_connector": "p2p", "seed": 7, **changed}
            addresses, client = await stack.enter_async_context(running_engine(**settings))
            return addresses.base_url, client

        url, source = await start()
        _, reader = await start()
        assert await cached(source) == 0
        assert await cached(reader, **p2p(url), cache_salt="x") == 0  # another namespace
        assert await cached(reader, **p2p("http://127.0.0.1:9")) == 0  # no server is there
        await reader.post("/reset_prefix_cache")
        assert await cached(reader, **p2p(url)) == 100
        assert await cached(reader) == 100  # it has its own copy now
        _, stranger = await start(seed=8)
        assert await cached(stranger, **p2p(url)) == 0  # it hashes blocks differently
        _, unable = await start(kv_connector=None)
        assert await cached(unable, **p2p(url)) == 0


async def test_a_hint_fetches_the_blocks_that_it_names() -> None:
    async with running_engine(kv_connector="kvcr", seed=7) as (addresses, source):
        await cached(source)
        for named, expected in ((HASHES, 100), (HASHES[:10], 40), (HASHES[1:], 0), ([], 0)):
            async with running_engine(kv_connector="kvcr", seed=7) as (_, reader):
                assert await cached(reader, **kvcr(addresses.base_url, named)) == expected


@pytest.mark.parametrize("groups", ["full,swa:16", "mamba,full"])
async def test_a_hybrid_fetches_no_more_than_it_can_resume(groups: str) -> None:
    settings: dict[str, Any] = {"kv_connector": "p2p", "seed": 7, "groups": groups, "num_gpu_blocks": 256}
    async with running_engine(**settings) as (addresses, source), running_engine(**settings) as (_, reader):
        await cached(source)
        again = await cached(source)
        assert await cached(reader, **p2p(addresses.base_url)) == again
