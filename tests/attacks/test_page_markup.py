"""Names, prompts and paths with markup and scripts, on the pages of running processes and in a browser."""

import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest
from playwright.async_api import Browser

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from tests.attacks.guarded_router import router_process
from tests.end_to_end.test_status_page import CHROMIUM, browser  # noqa: F401 a fixture
from tests.eventually import until
from tests.http_client import http_client
from tests.indexer.running_replica import running_replica
from tests.router.proxy.engines import record

pytestmark = pytest.mark.anyio

RUN = "window.taken=1"
MARKUP = (
    f"<script>{RUN}</script>",
    f"<img src=x onerror='{RUN}'>",
    f'" autofocus onfocus="{RUN}" x="',
    f"</textarea></title></style><svg onload={RUN}>",
    f"javascript:{RUN}",
    "{{7*7}}",
)
HOSTILE = "".join(MARKUP)


@asynccontextmanager
async def hostile_fleet(store: Store, nats_url: str, valkey_url: str) -> AsyncIterator[dict[str, str]]:
    """The pages of a router and an indexer whose fleet has a worker with such text in all of its names."""
    made = record("w", "http://10.0.0.1:8000")
    names = dict.fromkeys(("model_id", "tokenizer_id", "tenant_id", "locality_domain", "upper_bound"), HOSTILE)
    more = {"labels": {HOSTILE: HOSTILE}, "stores": ("s",), "transfer_groups": (HOSTILE,), "block_size": 4}
    endpoint = made.endpoint.model_copy(update={**names, **more})
    hostile = made.model_copy(update={"endpoint": endpoint, "doubt": HOSTILE, "tenants": (HOSTILE, "*")})
    async with (
        running_replica(nats_url, valkey_url, status_port=0) as replica,
        router_process(valkey_url) as router,
    ):
        await FleetStore(store).write({"w": hostile})
        yield {"router": router.url, "indexer": replica.status_url or ""}


async def test_no_page_of_a_process_has_markup_of_others(store: Store, fresh_nats: str, valkey_url: str) -> None:
    async with hostile_fleet(store, fresh_nats, valkey_url) as pages, http_client(timeout=60) as client:
        for role, url in pages.items():

            async def shows_it() -> bool:
                return html.escape(MARKUP[0], quote=False) in (await client.get(url)).text  # noqa: B023

            await until(shows_it, what=f"the {role}'s page shows the worker", deadline_s=60)
            answers = [await client.get(url)]
            if role == "router":
                for kind in ("text", "tokens", "messages"):
                    form = {"prompt": HOSTILE, "kind": kind, "model": HOSTILE, "tenant": HOSTILE}
                    answers.append(await client.post(url, data=form))
            for answer in answers:
                assert answer.headers["content-type"].startswith("text/html")
                policy = answer.headers["content-security-policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert not [markup for markup in MARKUP if markup in answer.text and "<" in markup]
                assert 'onfocus="' not in answer.text and "{{7*7}}" in answer.text
            for path in (f"/{quote(HOSTILE)}", f"/v1/models/{quote(HOSTILE)}", f"/blocks?model_id={quote(HOSTILE)}"):
                answer = await client.get(url + path)
                if HOSTILE[:8] in answer.text:
                    assert answer.headers["content-type"].startswith(("application/json", "text/plain")), path


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium")
async def test_a_browser_runs_nothing_of_others(
    store: Store,
    fresh_nats: str,
    valkey_url: str,
    browser: Browser,  # noqa: F811
) -> None:
    async with hostile_fleet(store, fresh_nats, valkey_url) as pages:
        for role, url in pages.items():
            page = await browser.new_page()
            await page.goto(url, timeout=60_000)

            async def shows_it() -> bool:
                return MARKUP[0] in await page.inner_text("body")  # noqa: B023

            await until(shows_it, what=f"refreshes bring the {role}'s page the worker", deadline_s=60)
            if role == "router":
                await page.fill("textarea", HOSTILE)
                await page.get_by_role("button", name="Probe").click()
                await page.wait_for_selector("#answer", timeout=60_000)
                assert await page.input_value("textarea") == HOSTILE
            assert await page.evaluate("window.taken") is None
            assert await page.locator("img, [onfocus], [onerror], [onload]").count() == 0
            await page.close()
