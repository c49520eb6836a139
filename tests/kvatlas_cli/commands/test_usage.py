"""`kvatlas usage` over a replayed trace of requests: its sums equal what was answered and what the index held."""

import asyncio
import csv
import io
import json
from collections import defaultdict
from random import Random
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.embedded import valkey_server
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.predictions.usage_counts import AnswerUse, User, add_answer_use, read_answer_use
from kvatlas.store.connection import connected_store
from kvatlas_cli.usage.rows import UsageRow, to_csv
from router_client import Prompt, RouterClient
from router_client.learning.token_counts import Usage
from tests.end_to_end.processes import query
from tests.eventually import until
from tests.kvatlas_cli.conftest import Cli

SCOPES = [Scope("m", "m", None, "acme"), Scope("m", "m", "sql", "acme"), Scope("m", "m", None, "globex")]


async def replay(url: str) -> dict[User, AnswerUse]:
    """Route some requests through two routers, each answered as if some tokens were cached. Returns what was answered, by
    user."""
    random, answered = Random(7), defaultdict[User, AnswerUse](AnswerUse)
    endpoint = EngineEndpoint(
        id="w", kind=EngineKind.VLLM, base_url="http://w:8000", model_id="m", tokenizer_id="m", block_size=4
    )
    async with connected_store(url, wait=False) as store:
        await store.client.flushall()
        index = await open_redis_index(store, writer=True)
        up = FleetRecord(endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE, incarnation=1)
        await FleetStore(store).write({"w": up})
        for scope in SCOPES:
            await index.put(ScopeUse(scope, 4, 1_000), "w", Tier.HBM, extend_chain(list(range(8)), 4))
    for _ in range(2):
        async with RouterClient.open(url, wait=False) as router:
            for _ in range(20):
                scope, tokens, cached = random.choice(SCOPES), random.randint(10, 99), random.randint(0, 9)
                prompt = Prompt.of_tokens(scope, list(range(tokens)))
                async with router.route(prompt) as choice:
                    await choice.done(usage=Usage(tokens, 3, cached))
                user = User(scope)
                answered[user] = answered[user].plus(AnswerUse(1, tokens, cached))
    return dict(answered)


def test_sums_are_those_of_the_answers_and_of_the_index(valkey_url: str, cli: Cli) -> None:
    answered = asyncio.run(replay(valkey_url))
    listed = ask(cli, valkey_url, "--json")
    rows = {(row["tenant"], row["adapter"]): row for row in json.loads(listed)}
    assert len(rows) == len(SCOPES)
    for user, use in answered.items():
        row = rows[user.scope.tenant_id, user.scope.adapter_id or ""]
        assert (row["answers"], row["prompt_tokens"], row["cached_tokens"]) == use[:3]
        assert row["saved_seconds"] > 0 and row["resident_byte_seconds"] == row["hbm_byte_seconds"] > 0
    as_csv = list(csv.DictReader(io.StringIO(ask(cli, valkey_url, "--csv"))))
    assert [row["cached_tokens"] for row in as_csv] == [str(row["cached_tokens"]) for row in json.loads(listed)]
    page = ask(cli, valkey_url, "--prometheus")
    assert "acme" not in page and "globex" not in page and "sql" not in page
    samples = {one.name: one.value for family in text_string_to_metric_families(page) for one in family.samples}
    assert samples["kvatlas_usage_cached_tokens_total"] == sum(use.cached_tokens for use in answered.values())
    before = sum(row["resident_byte_seconds"] for row in json.loads(listed))
    assert samples["kvatlas_usage_resident_byte_seconds_total"] >= before
    assert "acme" in ask(cli, valkey_url)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("=HYPERLINK(A1)", "'=HYPERLINK(A1)"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "\\t=1"),
        ("a\r=1,2", "a\\r=1,2"),
    ],
)
def test_no_name_is_a_formula_of_a_spreadsheet_or_a_line(name: str, written: str) -> None:
    """If salts are tenants, anyone who sends a cache salt names a tenant."""
    rows = [UsageRow(Scope(name, "t", name, name), name), UsageRow(Scope("m", "t", None, "acme"), "a=b")]
    dangerous, harmless = csv.DictReader(io.StringIO(to_csv(rows)))
    columns = ("model", "tenant", "adapter", "program")
    assert {dangerous[column] for column in columns} == {written}
    assert [harmless[column] for column in columns] == ["m", "acme", "", "a=b"]


@pytest.mark.anyio
async def test_a_store_that_fails_over_keeps_what_was_used() -> None:
    async def order(url: str, *words: str | int | None) -> object:
        async with connected_store(url, wait=False) as store:
            return await store.client.execute_command(*words)

    async def rows(url: str) -> dict[tuple[str, str], dict[str, float]]:
        listed = json.loads(await query("usage", "--json", "--redis-url", url))
        return {(row["tenant"], row["adapter"]): row for row in listed}

    async def replicated() -> bool:
        async with connected_store(primary.url, wait=False) as store:  # WAIT waits for this connection's writes
            await store.client.set("written", "last")
            return bool(await store.client.execute_command("WAIT", 1, 1_000))

    async with valkey_server() as replica, valkey_server() as primary:
        await order(replica.url, "REPLICAOF", "127.0.0.1", urlsplit(primary.url).port)
        await replay(primary.url)
        before = await rows(primary.url)
        await until(replicated, what="the replica has it all")
        await primary.kill()
        await order(replica.url, "REPLICAOF", "NO", "ONE")
        after = await rows(replica.url)
    assert after.keys() == before.keys()
    for user, row in before.items():
        for name in ("answers", "prompt_tokens", "cached_tokens", "saved_seconds"):
            assert after[user][name] == row[name] > 0
        assert after[user]["resident_byte_seconds"] >= row["resident_byte_seconds"] > 0


@pytest.mark.anyio
async def test_a_report_that_is_sent_twice_is_counted_once(valkey_url: str) -> None:
    user, use = User(SCOPES[0], "billing"), AnswerUse(1, 10, 5, 7)
    async with connected_store(valkey_url, wait=False) as store:
        await store.client.flushall()
        for number in (1, 2, 2, 1):
            await add_answer_use(store, "router", number, "p", {user: use})
        await add_answer_use(store, "another", 1, "p", {user: use})
        assert await read_answer_use(store, "p") == {user: AnswerUse(3, 30, 15, 21)}


def ask(cli: Cli, url: str, *flags: str) -> str:
    """The command's output."""
    done = cli("usage", "--redis-url", url, *flags)
    assert done.code == 0, done.err
    return done.out
