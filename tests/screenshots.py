"""`python -m tests.screenshots`: docs/images, from a small fleet that serves a workload, a Prometheus and a browser.

Takes two minutes, and needs Debian's `chromium` and `prometheus`. The dashboards' panels are drawn here from their own
queries, without Grafana: titles, units and legends are the dashboards'.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter
from PIL import Image
from playwright.async_api import Page, async_playwright

from k8s.dashboards.dashboards import DASHBOARDS, Dashboard, Panel
from kvatlas.embedded.free_port import LOOPBACK, free_port
from kvatlas_simulator.demo.load_generator import send_workload
from kvatlas_simulator.workload import Workload, chat_settings, generate_workload
from tests.deployment.test_alerts import FILE
from tests.end_to_end.prometheus import Prometheus
from tests.end_to_end.test_observability import running_fleet
from tests.end_to_end.test_status_page import CHROMIUM, SIZES
from tests.eventually import until
from tests.http_client import http_client

FOLDER = Path(__file__).parents[1] / "docs" / "images"
MODEL = "m"
ENGINES = 4
ENGINE_FLAGS = ("--speed-up", "4", "--num-gpu-blocks", "1536")
SESSIONS = 180
ARRIVALS_PER_S = 2.0
LOAD_S = 60.0
WINDOW = "10s"
"""Replaces Grafana's rate interval."""
COLOURS = 96
"""Number of colours in a picture, which reduces it to a third of the bytes."""
COLUMNS = 3


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    workload = generate_workload(chat_settings(seed=7, sessions=SESSIONS, arrivals_per_s=ARRIVALS_PER_S))
    status = free_port()
    with tempfile.TemporaryDirectory(prefix="kvatlas-screenshots-") as name:
        folder = Path(name)
        up_flags = ["--status-port", str(status)]
        async with running_fleet(folder, ENGINES, ENGINE_FLAGS, up_flags) as fleet:
            router = fleet.router
            await until(lambda: serves(router), what="the router sees the workers")
            with Prometheus(fleet.ports, folder, FILE) as prometheus:
                began_s = time.time()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(send_workload, workload, MODEL, router, 1.0, lambda _: None)
                    await anyio.sleep(LOAD_S)
                    await shoot_pages(router, f"http://{LOOPBACK}:{status}", workload)
                    tasks.cancel_scope.cancel()
                for board in DASHBOARDS:
                    await draw(board, prometheus.url, began_s, began_s + LOAD_S)
    size = sum(file.stat().st_size for file in FOLDER.glob("*.png"))
    print(f"{FOLDER}: {size / 1e3:,.0f} kB")


async def serves(router: str) -> bool:
    async with http_client() as client:
        answer = await client.get(f"{router}/ready")
        return answer.status_code == 200 and answer.json()["workers"] == ENGINES


# ---------------------------------------------------------------- status pages


async def shoot_pages(router: str, indexer: str, workload: Workload) -> None:
    prompt = " ".join(map(str, workload.sessions[0].prompt([])))
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        for name, url, size, scheme in (
            ("status-router", router, "laptop", "light"),
            ("status-router-dark", router, "laptop", "dark"),
            ("status-indexer", indexer, "laptop", "light"),
            ("status-phone", indexer, "phone", "light"),
            ("status-phone-dark", indexer, "phone", "dark"),
        ):
            width, height = SIZES[size]
            context = await browser.new_context(
                viewport={"width": width, "height": height}, color_scheme="dark" if scheme == "dark" else "light"
            )
            page = await context.new_page()
            await page.goto(f"{url}/")
            if url == router:
                await probe(page, prompt)
            await page.screenshot(path=FOLDER / f"{name}.png", full_page=size == "laptop")
            shrink(FOLDER / f"{name}.png")
            await context.close()
        await browser.close()


async def probe(page: Page, prompt: str) -> None:
    await page.fill("textarea", prompt)
    await page.select_option("select[name=kind]", "tokens")
    await page.get_by_role("button", name="Probe").click()
    await page.wait_for_selector("section#answer")


# ---------------------------------------------------------------- panels


async def draw(board: Dashboard, url: str, began_s: float, ended_s: float) -> None:
    rows = -(-len(board.panels) // COLUMNS)
    figure, axes = pyplot.subplots(rows, COLUMNS, figsize=(15, 2.3 * rows), constrained_layout=True, squeeze=False)
    figure.suptitle(board.title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    async with http_client(timeout=60) as client:
        for place in range(rows * COLUMNS):
            ax = axes[place // COLUMNS][place % COLUMNS]
            if place < len(board.panels):
                panel = board.panels[place]
                draw_panel(ax, panel, await series_of(client, url, panel, began_s, ended_s), began_s)
            else:
                ax.axis("off")
    file = FOLDER / f"{board.uid.replace('kvatlas-', 'dashboard-')}.png"
    figure.savefig(file, dpi=72)
    pyplot.close(figure)
    shrink(file)


async def series_of(
    client: httpx.AsyncClient, url: str, panel: Panel, began_s: float, ended_s: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    """(legend, points) of each series."""
    found = []
    for query in panel.queries:
        expr = query.expr.replace("$__rate_interval", WINDOW).replace("$worker", "w0")
        params: dict[str, Any] = {"query": expr, "start": began_s, "end": ended_s, "step": 1}
        answer = (await client.get(f"{url}/api/v1/query_range", params=params)).json()
        assert answer["status"] == "success", answer
        for series in answer["data"]["result"]:
            legend = query.legend or panel.title
            for label, value in series["metric"].items():
                legend = legend.replace(f"{{{{{label}}}}}", value)
            found.append((legend, [(at, float(value)) for at, value in series["values"]]))
    return found


def draw_panel(ax: Axes, panel: Panel, series: Sequence[tuple[str, list[tuple[float, float]]]], began_s: float) -> None:
    ax.set_title(panel.title, loc="left", fontsize=10)
    formats: dict[str, Formatter] = {
        "percentunit": FuncFormatter(lambda value, _: f"{value:.0%}"),
        "s": EngFormatter("s"),
        "bytes": EngFormatter("B"),
    }
    shown = formats.get(panel.unit, EngFormatter())
    points = [value for _, line in series for _, value in line if value == value]
    if panel.kind == "stat":
        ax.axis("off")
        last = next((value for _, line in series for _, value in reversed(line) if value == value), None)
        text = "no data" if last is None else shown(round(last, 3))
        ax.text(0.5, 0.45, text, ha="center", va="center", fontsize=26, transform=ax.transAxes, color="#2a63c4")
        return
    for legend, line in series:
        ax.plot([at - began_s for at, _ in line], [value for _, value in line], label=legend, linewidth=1.4)
    ax.set_ylim(0, max(points, default=0) * 1.1 or 1)
    if not any(points):
        ax.set_yticks([0])
    ax.yaxis.set_major_formatter(shown)
    ax.xaxis.set_major_formatter(EngFormatter("s"))
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    if 0 < len(series) <= 8:
        ax.legend(fontsize=7, loc="upper left", framealpha=0.6)


def shrink(file: Path) -> None:
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(COLOURS).save(file, optimize=True)


if __name__ == "__main__":
    if CHROMIUM is None or shutil.which("prometheus") is None:
        sys.exit("chromium or prometheus is missing: apt-get install chromium prometheus")
    pyplot.switch_backend("agg")
    anyio.run(main)
