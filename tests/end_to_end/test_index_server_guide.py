"""Runs the commands of docs/index-server.md, one after another, on free ports."""

import csv
import io
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.end_to_end.processes import query, service
from tests.end_to_end.test_router_guide import READY, commands
from tests.eventually import until
from tests.http_client import http_client

pytestmark = pytest.mark.anyio


async def test_the_guides_commands_lead_to_answers(tmp_path: Path) -> None:
    redis_url, seen = "", list[str]()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(http_client(timeout=60))
        for words in commands("docs/index-server.md"):
            match words:
                case ["kvatlas", "usage", *flags]:
                    printed = await query("usage", *flags, "--redis-url", redis_url)
                    assert "my-model" in printed
                    if flags:
                        (row,) = csv.DictReader(io.StringIO(printed))
                        assert row["tenant"] == "default"
                case ["kvatlas", command, *flags]:
                    if command == "up":
                        redis_url = f"redis://127.0.0.1:{flags[flags.index('--redis-port') + 1]}/0"
                        nats_url = f"nats://127.0.0.1:{flags[flags.index('--nats-port') + 1]}"
                        flags += ["--state-dir", str(tmp_path / "state")]
                    if command == "index-server":
                        flags += ["--redis-url", redis_url, "--nats-url", nats_url]
                    ready = {**READY, "index-server": "index server at"}[command]
                    await stack.enter_async_context(service(command, *flags, ready=ready, cwd=tmp_path))
                case ["curl", "-s", url, "-H", header, "-d", body]:
                    kind = header.partition(": ")[2]

                    async def is_answered(url: str = url, body: str = body, kind: str = kind) -> bool:
                        answer = await client.post(url, content=body, headers={"Content-Type": kind})
                        is_held = ":32" in answer.text.replace(" ", "") or url.endswith("/completions")
                        return answer.status_code == 200 and is_held

                    await until(is_answered, what=f"{url} says who holds two blocks")
                case ["curl", "-s", url]:
                    assert len((await client.get(url)).json()) == 1
                case _:
                    raise AssertionError(f"nothing checks {words}")
            seen.append(words[1])
    assert len(seen) == 10
