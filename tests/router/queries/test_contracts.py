"""Queries of other projects' routers, and the answers that their documentation promises."""

from typing import Any

import httpx
import pytest

from kvatlas.blocks.hashing import extend_chain, local_hash, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from tests.router.proxy.engines import BLOCK_SIZE, MODEL, record
from tests.router.queries.servers import TOKENS, hold, rank, running_index_server, write

pytestmark = pytest.mark.anyio

SEQUENCE = unpack_hashes(extend_chain(TOKENS, BLOCK_SIZE))
LOCAL = [local_hash(TOKENS[i : i + BLOCK_SIZE]) for i in range(0, len(TOKENS), BLOCK_SIZE)]
ADAPTER = Scope(MODEL, MODEL, "sql-adapter")
IN_MOONCAKES_WORDS = {
    "default": {
        "prefill-1": {"longest_matched": 16, "GPU": 8, "DP": {"0": 16, "1": 4}, "CPU": 16, "DISK": 0},
        "lone": {"longest_matched": 8, "GPU": 0, "DP": {"0": 8}, "CPU": 0, "DISK": 8},
    }
}
IN_DYNAMOS_WORDS = {
    "scores": {"prefill-1": {"0": 8, "1": 4}},
    "frequencies": [2, 1],
    "instances": {
        "prefill-1": {"longest_matched": 16, "gpu": 8, "dp": {"0": 8, "1": 4}, "cpu": 16, "disk": 16},
        "lone": {"longest_matched": 8, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 8},
    },
}


async def fill(store: Store) -> None:
    """An engine with two ranks, one of which holds half of the prompt twice, and an engine without ranks that holds it on
    disk."""
    index = await open_redis_index(store, writer=True)
    await write(store, rank("prefill-1", 0), rank("prefill-1", 1), record("lone", "http://lone:8000"))
    await hold(index, "prefill-1-dp0", TOKENS, Tier.CPU_DRAM)
    await hold(index, "prefill-1-dp0", TOKENS[:8])
    await hold(index, "prefill-1-dp1", TOKENS[:4])
    await hold(index, "lone", TOKENS[:8], Tier.LOCAL_SSD)
    await hold(index, "lone", TOKENS[:12], scope=ADAPTER)


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_mooncakes_dynamos_and_our_own_questions(store: Store, valkey_url: str) -> None:
    await fill(store)
    async with running_index_server(valkey_url) as (client, _):
        mooncake = {"model": MODEL, "block_size": BLOCK_SIZE}
        for tenant in ({}, {"tenant_id": "default"}):
            assert await ask(client, "/query", **mooncake, **tenant, token_ids=[*TOKENS, 99]) == IN_MOONCAKES_WORDS
            assert await ask(client, "/query_by_hash", **mooncake, **tenant, seq_hashes=SEQUENCE) == IN_MOONCAKES_WORDS
        as_text = [str(value) for value in SEQUENCE]
        assert await ask(client, "/query_by_hash", **mooncake, block_hash=as_text) == IN_MOONCAKES_WORDS
        one = await ask(client, "/query", **mooncake, token_ids=TOKENS, instance_id="lone", lora_name="")
        assert one == {"default": {"lone": IN_MOONCAKES_WORDS["default"]["lone"]}}
        with_adapter = await ask(client, "/query", **mooncake, token_ids=TOKENS, lora_name="sql-adapter")
        assert list(with_adapter["default"]) == ["lone"] and with_adapter["default"]["lone"]["GPU"] == 12
        for nothing in ({"block_size": 8}, {"cache_salt": "w8a8"}):
            assert await ask(client, "/query", **{**mooncake, **nothing}, token_ids=TOKENS) == {"default": {}}

        for group in ({}, {"routing_group": "default"}):
            assert await ask(client, "/query", model_name=MODEL, token_ids=TOKENS, **group) == IN_DYNAMOS_WORDS
        signed = [value - (1 << 64) if value >> 63 else value for value in LOCAL]
        for hashes in (LOCAL, signed):
            assert await ask(client, "/query_by_hash", model_name=MODEL, block_hashes=hashes) == IN_DYNAMOS_WORDS
        listed = (await client.get("/workers")).json()
        assert [(one["instance_id"], one["dp_rank"], one["block_size"]) for one in listed] == [
            ("lone", 0, BLOCK_SIZE),
            ("prefill-1", 0, BLOCK_SIZE),
            ("prefill-1", 1, BLOCK_SIZE),
        ]

        assert (await client.get("/workers", params={"routing_group": "default"})).json() == listed
        for nothing in ({"routing_group": "blue"}, {"model_name": "other"}):
            assert (await client.get("/workers", params=nothing)).json() == []

        for own in ({"token_ids": TOKENS}, {"block_hashes": SEQUENCE, "block_tokens": BLOCK_SIZE, "token_count": 16}):
            found = await ask(client, "/kvatlas/overlap", model_id=MODEL, **own)
            first = found["workers"][0]
            assert (first["worker"], first["resident_tokens"], first["usable_tokens"]) == ("prefill-1-dp0", 16, 12)
            assert first["runs"] == [
                {"tokens": 8, "tiers": ["hbm", "cpu_dram"]},
                {"tokens": 8, "tiers": ["cpu_dram"]},
            ]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/query", {"token_ids": [1]}, 400, "neither of model and model_name"),
        ("/query", {"model": MODEL, "model_name": MODEL}, 400, "both of model and model_name"),
        ("/query", {"model_name": MODEL}, 400, "token_ids is missing; expected a list"),
        ("/query", {"model_name": MODEL, "token_ids": [-1] * 8}, 400, "token id -1"),
        ("/query", {"model_name": "other", "token_ids": [1]}, 404, "no worker serves model 'other'"),
        ("/query", {"model_name": MODEL, "token_ids": [1], "routing_group": "blue"}, 404, "in routing group 'blue'"),
        ("/query", {"model": MODEL, "token_ids": [1], "tenant_id": "acme"}, 403, "a body proves none"),
        ("/query", {"model": MODEL, "token_ids": [1], "lora_id": 1}, 400, "send lora_name"),
        ("/query", {"model": MODEL, "token_ids": [1], "block_size": 0}, 400, "block_size is 0"),
        ("/query_by_hash", {"model_name": MODEL, "block_hashes": [1.5]}, 400, "block_hashes contains 1.5"),
        ("/query_by_hash", {"model_name": MODEL, "block_hashes": [1], "cache_salt": "x"}, 400, "cache_salt is given"),
        ("/query_by_hash", {"model": MODEL, "seq_hashes": [1 << 64]}, 400, "seq_hashes contains"),
        ("/register", {"instance_id": 1}, 405, "read-only"),
        ("/elsewhere", {}, 404, "Not Found"),
    ],
)
async def test_a_mistake_is_one_line(
    server: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    answer = await server.post(path, json=body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]
