"""What a page in a browser tries against a router on the same machine, which has the defaults: no users, all on loopback."""

import json

import pytest

from kvatlas.store.connection import Store
from tests.attacks.guarded_router import hints, router_process, tenants_fleet
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

ROUTE = "/kvatlas/route"
FROM_ELSEWHERE = (
    {"origin": "https://elsewhere.test", "sec-fetch-site": "cross-site"},
    {"origin": "http://127.0.0.1:1", "sec-fetch-site": "same-site"},
    {"origin": "https://elsewhere.test"},
    {"origin": "null"},
)
OUR_OWN: tuple[dict[str, str], ...] = (
    {},
    {"sec-fetch-site": "same-origin", "origin": "https://front.test"},
    {"sec-fetch-site": "none"},
)
"""Programs, our own page behind a proxy, and a person who typed the address."""


async def test_a_page_of_another_site_uses_no_operators_call(store: Store, valkey_url: str) -> None:
    body = json.dumps(hints())
    async with (
        tenants_fleet(store),
        router_process(valkey_url) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        simple = {"content-type": "text/plain"}
        for headers in FROM_ELSEWHERE:
            for path in (ROUTE, "/kvatlas/done", "/kvatlas%2froute", f"{ROUTE}%0A", "/"):
                answer = await client.post(path, content=body, headers={**simple, **headers})
                assert answer.status_code in (403, 404) and "worker" not in answer.text, (path, headers)
        for headers in OUR_OWN:
            answer = await client.post(ROUTE, content=body, headers={**simple, **headers})
            assert answer.status_code == 200, headers
        asked_first = {"content-type": "application/json", **FROM_ELSEWHERE[0]}
        assert (await client.post(ROUTE, content=body, headers=asked_first)).status_code == 200


async def test_a_name_that_leads_to_loopback_shows_a_page_nothing_of_operators(store: Store, valkey_url: str) -> None:
    async with (
        tenants_fleet(store),
        router_process(valkey_url) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for path in ("/status", "/metrics", "/", "/%73tatus", "/status%0A"):
            for host in ("elsewhere.test", f"elsewhere.test:{router.port}", "127.0.0.1.elsewhere.test", "a.b:80:1"):
                answer = await client.get(path, headers={"host": host})
                assert answer.status_code == 403 and "localhost" in answer.text, (path, host)
        for host in (f"127.0.0.1:{router.port}", "localhost", f"[::1]:{router.port}", "router:8080", "a.localhost"):
            assert (await client.get("/status", headers={"host": host})).status_code == 200, host
        assert (await client.get("/v1/models", headers={"host": "api.elsewhere.test"})).status_code == 200
        named = {"host": "status.corp.test", "authorization": "Bearer operator"}
        assert (await client.get("/status", headers=named)).status_code == 200, "no page has this"
