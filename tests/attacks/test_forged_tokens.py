"""Forged tokens, and issuers that hang, move or change their keys, at a router with everything switched on."""

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from kvatlas.store.connection import Store
from tests.attacks.guarded_router import (
    ACME,
    COMPLETIONS,
    bearer,
    clients_text,
    completion,
    guarded_router,
    tenants_fleet,
)
from tests.eventually import until
from tests.http_client import http_client
from tests.router.tenancy.test_issuer import ISSUER, Keys, forged_tokens, served_keys

pytest.importorskip("jwt", reason="PyJWT is not installed")
pytestmark = pytest.mark.anyio

MODELS = "/v1/models"
SILENT, MOVED = "https://silent.corp", "https://moved.corp"


class OddIssuers:
    """`/silent` never answers; `/moved` sends readers to another address."""

    def __init__(self, elsewhere: str) -> None:
        self.asked = self.left = 0
        self.url = ""
        self._elsewhere = elsewhere

    async def silent(self, _: web.Request) -> web.Response:
        self.asked += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left += 1
        raise AssertionError

    async def moved(self, _: web.Request) -> web.Response:
        raise web.HTTPFound(self._elsewhere)


@asynccontextmanager
async def odd_issuers(elsewhere: str) -> AsyncIterator[OddIssuers]:
    odd = OddIssuers(elsewhere)
    application = web.Application()
    application.router.add_get("/silent", odd.silent)
    application.router.add_get("/moved", odd.moved)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        odd.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield odd
    finally:
        await runner.cleanup()


def with_issuers(keys: Keys, odd: OddIssuers) -> str:
    addresses = {
        "corp": (ISSUER, keys.url),
        "silent": (SILENT, f"{odd.url}/silent"),
        "moved": (MOVED, f"{odd.url}/moved"),
    }
    return clients_text() + "".join(
        textwrap.dedent(f"""
            [issuers.{name}]
            issuer = "{issuer}"
            audience = "kvatlas"
            keys_url = "{url}"
            tenants = ["acme", "o*"]
            """)
        for name, (issuer, url) in addresses.items()
    )


async def test_no_forged_token_proves_a_tenant(store: Store, valkey_url: str, tmp_path: Path) -> None:
    async with (
        tenants_fleet(store),
        served_keys() as keys,
        served_keys() as strangers,
        odd_issuers(strangers.url) as odd,
        guarded_router(valkey_url, tmp_path, with_issuers(keys, odd)) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        forged = forged_tokens(keys)
        for act, token in forged.items():
            for headers in (bearer(token.decode("latin-1")), {"x-api-key": token.decode("latin-1")}):
                answer = await client.post(COMPLETIONS, json=completion(), headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key", act
            named = {**bearer(token.decode("latin-1")), "x-kvatlas-tenant": "acme"}
            assert (await client.get(MODELS, headers=named)).status_code == 401, act
        assert (await client.get(MODELS, headers=bearer(keys.sign().decode()))).status_code == 200
        named = {**bearer(keys.sign().decode()), "x-kvatlas-tenant": "other"}
        assert (await client.get(MODELS, headers=named)).status_code == 403
        moved = await client.get(MODELS, headers=bearer(strangers.sign(iss=MOVED).decode()))
        assert moved.status_code == 503 and not strangers.asked
        secrets = [token.decode("latin-1") for token in forged.values() if len(token) > 20]
        assert not any(secret in line for line in await router.log() for secret in secrets)


async def test_a_silent_issuer_delays_no_other_client_and_new_keys_replace_old_ones(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with (
        tenants_fleet(store),
        served_keys() as keys,
        odd_issuers("") as odd,
        guarded_router(valkey_url, tmp_path, with_issuers(keys, odd)) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        old, seen = keys.sign().decode(), keys.sign(iss=SILENT).decode()
        assert (await client.get(MODELS, headers=bearer(old))).status_code == 200

        async def others_are_answered_meanwhile() -> bool:
            asked, left = odd.asked, odd.left
            waiting = asyncio.create_task(client.get(MODELS, headers=bearer(seen)))
            await until(lambda: odd.asked > asked, what="the router asks the silent issuer", deadline_s=60)
            answers = [(await client.get(MODELS, headers=bearer(key))).status_code for key in (ACME, old)]
            meanwhile = odd.left == left
            assert (await waiting).status_code == 503 and answers == [200, 200]
            return meanwhile

        await until(others_are_answered_meanwhile, what="others are answered while it hangs", deadline_s=60)
        keys.by_id.clear()
        keys.add("b")
        new = keys.sign("b").decode()

        async def are_replaced() -> bool:
            statuses = [(await client.get(MODELS, headers=bearer(token))).status_code for token in (new, old)]
            return statuses == [200, 401]

        await until(are_replaced, what="the new key counts, and the old one does not", deadline_s=60)
