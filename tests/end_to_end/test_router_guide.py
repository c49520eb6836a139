"""The commands of docs/router.md's first section, one after another, on free ports."""

import json
import re
import shlex
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from tests.end_to_end.processes import ROOT, service
from tests.eventually import until

pytestmark = pytest.mark.anyio

TITLE = "## From nothing to a router in ten minutes\n"
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d+")
READY = {"simulate-engine": "at http://", "up": "stop with Ctrl-C", "router": "router at"}


def commands() -> list[list[str]]:
    section = (ROOT / "docs/router.md").read_text().partition(TITLE)[2].partition("\n## ")[0]
    lines = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    ports: dict[str, str] = {}
    free = [PORT.sub(lambda found: ports.setdefault(found[0], str(free_port())), line) for line in lines]
    return [shlex.split(line) for line in free]


async def test_the_first_commands_lead_to_answers(tmp_path: Path) -> None:
    asked: list[str] = []
    redis_url = ""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=20))
        for words in commands():
            match words:
                case ["python3", "-m", "venv", *_]:
                    pass  # this environment is one
                case ["pip", "install", what]:
                    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                    assert what.removeprefix(".[").removesuffix("]") in project["optional-dependencies"]
                case ["kvatlas", command, *flags]:
                    if command == "router":
                        flags += ["--redis-url", redis_url, "--drain-s", "0"]  # what `up` prints to export
                    if command == "up":
                        redis_url = f"redis://127.0.0.1:{flags[flags.index('--redis-port') + 1]}/0"
                        flags += ["--state-dir", str(tmp_path / "state")]
                    await stack.enter_async_context(service(command, *flags, ready=READY[command], cwd=tmp_path))
                case ["curl", _, url, "-d", body]:

                    async def is_routed(url: str = url, body: str = body) -> bool:
                        answer = await client.post(url, content=body)
                        return answer.status_code == 200 and "x-kvatlas-decision" in answer.headers

                    await until(is_routed, deadline_s=30, what=f"{url} answers")
                    asked.append(url)
                case ["curl", "-s", url]:
                    assert json.loads((await client.get(url)).text)
                    asked.append(url)
                case _:
                    raise AssertionError(f"nothing checks {words}")
    assert len(asked) == 4
