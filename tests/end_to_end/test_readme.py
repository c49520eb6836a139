"""README's first use: simulated engines, everything else in one command, and one request, on free ports."""

import re
import shlex
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvatlas.embedded.free_port import free_port
from tests.end_to_end.processes import ROOT, service
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=--port )\d+")


async def test_the_first_use_takes_one_command_and_one_request(tmp_path: Path) -> None:
    ports: dict[str, str] = {}

    def free(port: str) -> str:
        return ports.setdefault(port, str(free_port()))

    lines = [line for block in BLOCKS for line in block.splitlines()]
    commands = [shlex.split(PORT.sub(lambda found: free(found[0]), line), comments=True) for line in lines]
    engines = [words[1:] for words in commands if words[1] == "simulate-engine"]
    ups = [words[1:] for words in commands if words[1] == "up"]
    (curl,) = [words for words in commands if words[0] == "curl"]
    assert len(engines) == 2 and all("--router" in words for words in ups)
    assert f"http://127.0.0.1:{free('8000')}" in ups[0], "the first line names the engine of the example"
    async with AsyncExitStack() as stack:
        for words in engines:
            events = [] if "--endpoint" in words else ["--endpoint", f"tcp://127.0.0.1:{free('5557')}"]
            events += [] if "--replay-endpoint" in words else ["--replay-endpoint", f"tcp://127.0.0.1:{free('5558')}"]
            await stack.enter_async_context(service(*words, *events, ready="at http://", cwd=tmp_path))
        flags = ["--router-port", free("8080"), "--nats-port", "0", "--redis-port", "0"]
        await stack.enter_async_context(service(*ups[-1], *flags, ready="router at", cwd=tmp_path))
        url, body = curl[2], curl[curl.index("-d") + 1]
        async with http_client(timeout=30) as client:
            answer = await client.post(url, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200 and answer.json()["choices"]
        assert re.match(r'"w[01]";cached=0;prompt=\d+;attempt=1;by=cost;', answer.headers["x-kvatlas-decision"])
