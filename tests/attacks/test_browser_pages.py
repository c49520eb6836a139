"""What a page in a browser tries against a router on the same machine, with the default settings: no users, everything on
loopback."""

import json
from pathlib import Path

import pytest

from kvatlas.store.connection import Store
from tests.attacks.guarded_router import (
    ACME,
    COMPLETIONS,
    OPERATOR,
    bearer,
    completion,
    guarded_router,
    hints,
    router_process,
    tenants_fleet,
)
from tests.http_client import http_client
from tests.indexer.running_replica import running_replica

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
"""From programs, our own page behind a proxy, and a person who typed the address."""


CHAT_PAGE = "https://chat.example"
SIMPLE = {"content-type": "text/plain"}
"""Browsers send this without asking the server first."""


async def test_a_page_of_another_site_uses_no_call(store: Store, valkey_url: str) -> None:
    body = json.dumps(hints())
    async with (
        tenants_fleet(store),
        router_process(valkey_url) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for headers in FROM_ELSEWHERE:
            for path in (ROUTE, "/kvatlas/done", "/kvatlas%2froute", f"{ROUTE}%0A", "/", COMPLETIONS, "/new"):
                for more in ({}, {"authorization": "Bearer any"}):
                    answer = await client.post(path, content=body, headers={**SIMPLE, **headers, **more})
                    assert answer.status_code == 403 and "another site" in answer.text, (path, headers, more)
        for headers in OUR_OWN:
            answer = await client.post(ROUTE, content=body, headers={**SIMPLE, **headers})
            assert answer.status_code == 200, headers
        asked_first = {"content-type": "application/json", **FROM_ELSEWHERE[0]}
        assert (await client.post(ROUTE, content=body, headers=asked_first)).status_code == 200


async def test_a_name_that_leads_to_loopback_shows_a_page_nothing(store: Store, valkey_url: str) -> None:
    async with (
        tenants_fleet(store),
        router_process(valkey_url) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for path in ("/status", "/metrics", "/", "/%73tatus", "/status%0A", "/v1/models", "/version", "/new"):
            for host in ("elsewhere.test", f"elsewhere.test:{router.port}", "127.0.0.1.elsewhere.test", "a.b:80:1"):
                for more in ({}, {"authorization": "Bearer any"}, {"x-api-key": "any"}):
                    answer = await client.get(path, headers={"host": host, **more})
                    assert answer.status_code == 403 and "localhost" in answer.text, (path, host, more)
        for host in (f"127.0.0.1:{router.port}", "localhost", f"[::1]:{router.port}", "router:8080", "a.localhost"):
            assert (await client.get("/status", headers={"host": host})).status_code == 200, host
        for path in ("/health", "/ready", "/readyz"):
            assert (await client.get(path, headers={"host": "probe.elsewhere.test"})).status_code == 200


async def test_with_keys_or_tokens_any_name_may_lead_to_the_router(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    """No page knows a key, so a proxy in front of the router may keep the host name that clients used."""
    async with tenants_fleet(store), guarded_router(valkey_url, tmp_path) as router, http_client(timeout=60) as client:
        named = {"host": "api.corp.test", **FROM_ELSEWHERE[0]}
        for key, status in ((ACME, 200), ("wrong", 401)):
            answer = await client.get(f"{router.url}/v1/models", headers={**named, **bearer(key)})
            assert answer.status_code == status
        for key, status in ((OPERATOR, 200), ("wrong", 401)):
            answer = await client.get(f"{router.control}/status", headers={**named, **bearer(key)})
            assert answer.status_code == status


async def test_a_page_that_may_use_the_router_uses_no_operators_call(store: Store, valkey_url: str) -> None:
    page = {"origin": CHAT_PAGE, "sec-fetch-site": "cross-site", **SIMPLE}
    async with (
        tenants_fleet(store),
        router_process(valkey_url, "--cors-origins", CHAT_PAGE) as router,
        http_client(timeout=60) as client,
    ):
        body = json.dumps(completion())
        answer = await client.post(router.url + COMPLETIONS, content=body, headers=page)
        assert answer.status_code in (200, 503) and answer.headers["access-control-allow-origin"] == CHAT_PAGE
        assert (
            await client.post(router.url + COMPLETIONS, content=body, headers={**page, **FROM_ELSEWHERE[0]})
        ).status_code == 403
        for path in (ROUTE, "/status", "/"):
            assert (await client.get(router.url + path, headers=page)).status_code == 404, path
        assert router.control != router.url
        assert (await client.post(router.control + ROUTE, content=body, headers=page)).status_code == 403
        read = await client.get(f"{router.control}/status", headers=page)
        assert "access-control-allow-origin" not in read.headers


async def test_a_page_neither_reads_nor_removes_blocks_of_an_indexer(fresh_nats: str, fresh_valkey: str) -> None:
    async with (
        running_replica(fresh_nats, fresh_valkey, status_port=0) as replica,
        http_client(base_url=replica.status_url or "", timeout=60) as client,
    ):
        remove = "/blocks/remove?model_id=m&hash=1&worker=w"
        for headers in FROM_ELSEWHERE:
            assert (await client.post(remove, headers={**SIMPLE, **headers})).status_code == 403
        for path in ("/blocks?model_id=m&hash=1", "/blocks/children?model_id=m", "/status", "/metrics", "/"):
            assert (await client.get(path, headers={"host": "elsewhere.test"})).status_code == 403, path
            assert (await client.get(path)).status_code in (200, 400), path
        assert (await client.get("/healthz", headers={"host": "elsewhere.test"})).status_code == 200
