"""A tenant's queries are answered from its own blocks alone, and operators name the tenant that they ask for."""

from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_router.tenancy.proof import hash_of
from tests.http_client import http_client
from tests.router.proxy.engines import BLOCK_SIZE, MODEL, record
from tests.router.queries.servers import TOKENS, hold, running_index_server, write
from tests.router.tokens.small_model import save_simulators

pytestmark = pytest.mark.anyio

QUESTION = {"model": MODEL, "block_size": BLOCK_SIZE, "token_ids": TOKENS}


async def holders(
    client: httpx.AsyncClient, headers: Mapping[str, str], question: Mapping[str, object] = QUESTION
) -> dict[str, int]:
    """Tokens by instance, under the tenant's name in the query."""
    answer = await client.post("/query", json=question, headers=dict(headers))
    assert answer.status_code == 200, answer.text
    (found,) = answer.json().values()
    return {instance: one["longest_matched"] for instance, one in found.items()}


async def test_each_sees_its_own_blocks_and_the_workers_that_it_may_use(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    index = await open_redis_index(store, writer=True)
    others = record("others", "http://others:8000").model_copy(update={"tenants": ("globex",)})
    await write(store, record("a", "http://a:8000"), record("b", "http://b:8000"), others)
    await hold(index, "a", TOKENS, scope=Scope(MODEL, MODEL, None, "acme"))
    await hold(index, "b", TOKENS[:8], scope=Scope(MODEL, MODEL, None, "globex"))
    await hold(index, "others", TOKENS, scope=Scope(MODEL, MODEL, None, "acme"))
    clients, tokens = tmp_path / "clients.toml", tmp_path / "operators"
    clients.write_text(
        f'[clients.a]\nkeys = ["{hash_of(b"key-a")}"]\ntenants = ["acme"]\n'
        f'[clients.g]\nkeys = ["{hash_of(b"key-g")}"]\ntenants = ["globex"]\nmodels = ["another"]\n'
    )
    tokens.write_text("operator")
    control = free_port()
    given = {"clients_file": clients, "control_port": control, "control_token_file": tokens}
    async with running_index_server(valkey_url, **given) as (client, _):
        acme = {"Authorization": "Bearer key-a"}
        assert await holders(client, acme) == {"a": 16}
        assert await holders(client, acme, {**QUESTION, "tenant_id": "acme"}) == {"a": 16}
        foreign = await client.post("/query", json={**QUESTION, "tenant_id": "globex"}, headers=acme)
        assert foreign.status_code == 403
        assert (await client.post("/query", json=QUESTION)).status_code == 401
        assert (await client.get("/workers")).status_code == 401
        assert [one["worker"] for one in (await client.get("/workers", headers=acme)).json()] == ["a", "b"]
        kept_out = await client.post("/query", json=QUESTION, headers={"Authorization": "Bearer key-g"})
        assert kept_out.status_code == 404
        assert (await client.get("/metrics", headers=acme)).status_code == 404
        async with http_client(base_url=f"http://127.0.0.1:{control}") as operators:
            assert (await operators.post("/query", json=QUESTION)).status_code == 401
            allowed = {"Authorization": "Bearer operator"}
            assert await holders(operators, {**allowed, "X-KVAtlas-Tenant": "globex"}) == {
                "b": 8,
            }
            assert await holders(operators, allowed) == {}
            status = (await operators.get("/status", headers=allowed)).json()
            assert status["tenancy"]["foreign"] == 0 and status["tenancy"]["unproven"] >= 2


async def test_text_is_asked_with_the_models_own_tokenizer(store: Store, valkey_url: str, tmp_path: Path) -> None:
    save_simulators(tmp_path)
    index = await open_redis_index(store, writer=True)
    await write(store, record("w", "http://w:8000"))
    async with running_index_server(valkey_url, tokenizer=str(tmp_path), tokenizer_deadline_ms=60_000) as (client, _):
        text = "who holds what, and since when? " * 4
        question = {"model": MODEL, "prompt": text}
        empty = (await client.post("/kvatlas/overlap", json=question)).json()
        assert empty["prompt_tokens"] >= 4 * BLOCK_SIZE and not empty["workers"]
        await hold(index, "w", list(text.encode()))  # its tokenizer makes one token per byte
        found = (await client.post("/kvatlas/overlap", json=question)).json()
        assert found["workers"][0]["resident_tokens"] > 0
