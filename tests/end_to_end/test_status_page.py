"""The status pages in a real browser: on a laptop and on a phone, light and dark, and without scripts.

Debian's Chromium, driven by Playwright over the browser's own protocol; its own browsers are not downloaded.
"""

import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Browser, Page, async_playwright

from kvatlas.store.connection import Store, connected_store
from tests.eventually import until
from tests.indexer.running_replica import running_replica
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is missing: apt-get install chromium"),
]

TEXT = "Who holds this prefix? It does. " * 8
SIZES: Mapping[str, tuple[int, int]] = {"laptop": (1280, 800), "phone": (390, 844)}


@pytest.fixture(scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    variables: dict[str, str | float | bool] = {
        **os.environ,
        "HOME": str(tmp_path_factory.mktemp("home")),
    }  # it writes there, whichever user runs the tests
    async with async_playwright() as playwright:
        started = await playwright.chromium.launch(executable_path=CHROMIUM, env=variables)
        yield started
        await started.close()


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_valkey, wait=False) as opened:
        yield opened


@asynccontextmanager
async def opened(
    browser: Browser, url: str, size: str, scheme: str = "light", *, scripts: bool = True
) -> AsyncIterator[Page]:
    """The page as a person sees it. Closing it fails if it requested anything elsewhere, or if the browser refused
    something."""
    width, height = SIZES[size]
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        java_script_enabled=scripts,
    )
    page = await context.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    await page.goto(f"{url}/")
    yield page
    await context.close()
    assert {one.split("#")[0] for one in asked if not one.startswith("data:")} == {f"{url}/"}
    assert complaints == []


async def overflow(page: Page) -> int:
    """Pixels by which the page is wider than the window."""
    return int(await page.evaluate("document.scrollingElement.scrollWidth - document.documentElement.clientWidth"))


async def test_a_router_in_a_browser(store: Store, valkey_url: str, browser: Browser) -> None:
    async with (
        running_fleet(store, {"w1": {"num_gpu_blocks": 256}, "w2": {"num_gpu_blocks": 256}}) as fleet,
        running_proxy(valkey_url, learn=False) as client,
    ):
        url = str(client.base_url).rstrip("/")
        await fleet.holds("w2", list(TEXT.encode()))
        backs = {}
        for size in SIZES:
            for scheme in ("light", "dark"):
                async with opened(browser, url, size, scheme) as page:
                    assert await page.title() == f"router {await name_of(page)} · kvatlas"
                    assert await overflow(page) == 0
                    for text in ("Workers", "w1", "64 hbm", "Probe"):
                        assert await page.get_by_text(text, exact=True).first.is_visible(), text
                    backs[scheme] = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert backs["light"] != backs["dark"]

        async with opened(browser, url, "laptop") as page:
            await page.fill("textarea", "what is typed here stays")
            asked = {"model": MODEL, "prompt": TEXT, "max_tokens": 2}
            assert (await client.post("/v1/completions", json=asked)).status_code == 200
            await page.get_by_text("The last 1", exact=True).click(timeout=20_000)  # it appears by itself
            await until_refreshed(page)
            assert await page.get_by_text("cost", exact=True).first.is_visible()  # it stays unfolded
            assert await page.input_value("textarea") == "what is typed here stays"


async def test_a_probe_in_a_browser_without_scripts(store: Store, valkey_url: str, browser: Browser) -> None:
    async with (
        running_fleet(store, {"w1": {}, "w2": {}}) as fleet,
        running_proxy(valkey_url, learn=False) as client,
    ):
        url = str(client.base_url).rstrip("/")
        await fleet.holds("w2", list(TEXT.encode()))
        for size in SIZES:
            async with opened(browser, url, size, scripts=False) as page:
                assert "reload for newer figures" in await page.inner_text("header")
                assert await page.get_by_text("64 hbm", exact=True).is_visible()
                await page.fill("textarea", TEXT)
                await page.select_option("select[name=kind]", "text")
                await page.click("button")
                answer = await page.inner_text("#answer")
                assert "w2 would be chosen: 252 prompt tokens cached" in answer
                assert re.search(r"w1\s", answer) and "64 of 64" in answer
                assert await page.input_value("textarea") == TEXT
                assert await page.locator("#answer").is_visible()


async def test_an_indexer_in_a_browser(fresh_nats: str, fresh_valkey: str, browser: Browser) -> None:
    async with running_replica(fresh_nats, fresh_valkey, status_port=0) as replica:
        assert replica.status_url is not None
        for size in SIZES:
            async with opened(browser, replica.status_url, size, "dark") as page:
                assert await page.get_by_text("64 of 64", exact=True).is_visible()
                await page.get_by_text("All 64 partitions", exact=True).click()
                assert await page.locator("#partitions-2 tbody tr").count() == 64
                assert await page.locator("#partitions-2").get_by_text("63", exact=True).is_visible()
                if (width := SIZES[size][0]) < 700:
                    assert await page.evaluate("document.scrollingElement.scrollWidth") == width


async def name_of(page: Page) -> str:
    return (await page.inner_text("h1 .name")).strip()


async def until_refreshed(page: Page) -> None:
    await page.evaluate("document.getElementById('live').dataset.old = 'yes'")

    async def is_new() -> bool:
        return bool(await page.evaluate("!document.getElementById('live').dataset.old"))

    await until(is_new, what="the page refreshes itself")
