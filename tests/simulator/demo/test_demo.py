"""A small demo reports its figures and leaves no process running, even if it is interrupted."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from tests.end_to_end.processes import environment
from tests.eventually import until
from tests.kvatlas.embedded.process_table import descendants, is_alive

pytestmark = pytest.mark.anyio

SMALL = ["--engines", "2", "--indexers", "1", "--sessions", "6", "--speed-up", "20", "--num-gpu-blocks", "1024"]


async def _start(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvatlas_cli.main",
        "demo",
        "--json",
        *SMALL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(),
        cwd=folder,
    )


async def _wait_for_parts(demo: int) -> set[int]:
    """All processes that the demo starts: two servers, an indexer, two engines, two sidecars, two routers."""
    await until(lambda: len(descendants(demo)) >= 9, deadline_s=60, what="every part of the demo runs")
    return descendants(demo)


async def test_the_demo_reports_both_policies_and_leaves_no_process_behind(tmp_path: Path) -> None:
    process = await _start(tmp_path)
    output = asyncio.create_task(process.communicate())
    parts = await _wait_for_parts(process.pid)
    with anyio.fail_after(90):
        out, err = await output
    assert process.returncode == 0, err.decode()
    round_robin, kvatlas = json.loads(out)
    assert (round_robin["policy"], kvatlas["policy"]) == ("round-robin", "kvatlas")
    assert round_robin["requests"] == kvatlas["requests"] > 6
    assert kvatlas["cached_tokens"] > 0
    for phase in (round_robin, kvatlas):
        exact = round(phase["predicted_exactly"] * phase["requests"])
        assert exact + sum(phase["deviations"].values()) == phase["requests"]
        assert phase["deviations"]["other_tokens"] == 0
    assert kvatlas["blocks_indexed"] > 0
    assert not any(map(is_alive, parts))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path, how: signal.Signals) -> None:
    process = await _start(tmp_path)
    parts = await _wait_for_parts(process.pid)
    os.kill(process.pid, how)
    with anyio.fail_after(60):
        await process.communicate()
    await until(lambda: not any(map(is_alive, parts)), what="every process of the demo is gone")
