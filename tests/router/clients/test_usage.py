"""`kvatlas usage` bills each program for its requests through the proxy."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from kvatlas_router.tenancy.proof import hash_of
from tests.end_to_end.processes import query
from tests.eventually import until
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy

pytestmark = pytest.mark.anyio

TENANTS = {"billing": "acme", "search": "acme", "agents": "globex"}
"""The tenant of each program. A program is a client in the clients file, and its key is its name."""
MODELS = {MODEL: None, "sql": "sql"}
"""The adapter for each model name in requests."""
Bill = dict[tuple[str, ...], Counter[str]]


async def test_each_programs_bill_is_the_sum_of_its_answers(store: Store, valkey_url: str, tmp_path: Path) -> None:
    file = tmp_path / "clients.toml"
    texts = (
        f'[clients.{p}]\nkeys = ["{hash_of(p.encode())}"]\ntenants = ["{t}"]\ndecisions = true\n'
        for p, t in TENANTS.items()
    )
    file.write_text("".join(texts))
    random, answered = Random(7), Bill()
    given = {"clients_file": file, "control_port": 0}
    async with (
        running_fleet(store, {"w1": {"adapters": "sql"}, "w2": {"adapters": "sql"}}) as fleet,
        running_proxy(valkey_url, **given) as client,
    ):
        for tenant in sorted(set(TENANTS.values())):
            for adapter in MODELS.values():
                await fleet.holds("w1", list(range(8)), Scope(MODEL, MODEL, adapter, tenant))
        for number in range(40):
            program, model = random.choice(sorted(TENANTS)), random.choice(sorted(MODELS))
            start = random.randrange(3)
            body = {"model": model, "prompt": list(range(start, start + random.randint(9, 40))), "max_tokens": 2}
            headers = {"authorization": f"Bearer {program}"}
            if number % 2:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            last = answer.text.split("data: ")[-2] if number % 2 else answer.text
            usage = json.loads(last)["usage"]
            row = answered.setdefault((MODEL, TENANTS[program], MODELS[model] or "", program), Counter())
            row["answers"] += 1
            row["prompt_tokens"] += usage["prompt_tokens"]
            row["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
        assert sum(row["cached_tokens"] for row in answered.values()) > 0

        async def billed() -> Bill:
            listed = json.loads(await query("usage", "--json", "--redis-url", valkey_url))
            names, sums = ("model", "tenant", "adapter", "program"), ("answers", "prompt_tokens", "cached_tokens")
            return {
                tuple(row[name] for name in names): Counter({one: row[one] for one in sums if row[one]})
                for row in listed
                if row["program"]
            }

        async def is_billed() -> bool:
            return sum(row["answers"] for row in (await billed()).values()) == 40

        await until(is_billed, deadline_s=60, what="every answer is billed to a program")
        assert await billed() == {names: +row for names, row in answered.items()}
