"""Runs the commands of docs/router.md, docs/disaggregation.md and docs/fetching.md, one after another, on free ports, along
with those of the reference."""

import json
import re
import shlex
import tomllib
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from tests.end_to_end.processes import ROOT, query, service
from tests.eventually import until
from tests.http_client import http_client

pytestmark = pytest.mark.anyio

PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+|(?<=port )\d+")
CURLS_OWN = "application/x-www-form-urlencoded"
READY = {"simulate-engine": "at http://", "up": "stop with Ctrl-C", "router": "router at"}
QUESTIONS = re.findall(r"(?m)^\$ (kvatlas .*)$", (ROOT / "docs/router-reference.md").read_text())


def commands(document: str) -> list[list[str]]:
    """The commands in all blocks of the document. The same port always becomes the same free port."""
    text = (ROOT / document).read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    ports: dict[str, str] = {}
    free = [PORT.sub(lambda found: ports.setdefault(found[0], str(free_port())), line) for line in lines]
    return [shlex.split(line) for line in free]


@pytest.mark.parametrize(
    ("document", "connector"),
    [("docs/router.md", ""), ("docs/disaggregation.md", ""), ("docs/fetching.md", "p2p"), ("docs/fetching.md", "kvcr")],
)
async def test_a_guides_commands_lead_to_answers(tmp_path: Path, document: str, connector: str) -> None:
    done: list[str] = []
    redis_url = nats_url = router_url = ""
    ids: list[str] = []
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(http_client(timeout=60))
        for words in commands(document):
            done.append(words[1])
            match words:
                case ["python3", "-m", "venv", *_]:
                    pass  # this environment already is one
                case ["pip", "install", what]:
                    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
                    assert what.removeprefix(".[").removesuffix("]") in project["optional-dependencies"]
                case ["kvatlas", command, *flags]:
                    flags = [connector if flag == "p2p" else flag for flag in flags]
                    if command == "router":
                        router_url = f"http://127.0.0.1:{flags[flags.index('--port') + 1]}"
                        flags += [
                            "--redis-url",
                            redis_url,
                            "--nats-url",
                            nats_url,
                            "--drain-s",
                            "0",
                        ]  # as `up` prints it
                    if command == "up":
                        redis_url = f"redis://127.0.0.1:{flags[flags.index('--redis-port') + 1]}/0"
                        nats_url = f"nats://127.0.0.1:{flags[flags.index('--nats-port') + 1]}"
                        flags += ["--state-dir", str(tmp_path / "state")]
                    await stack.enter_async_context(service(command, *flags, ready=READY[command], cwd=tmp_path))
                case ["curl", _, url, "-d", body] if url.endswith("/kvatlas/done"):
                    answer = await client.post(url, content=body.replace("ID", ids[-1]))
                    assert answer.json() == {"known": True}
                case ["curl", _, url, *header, "-d", body]:
                    kind = header[1].partition(": ")[2] if header else CURLS_OWN

                    async def is_answered(url: str = url, body: str = body, kind: str = kind) -> bool:
                        answer = await client.post(url, content=body, headers={"Content-Type": kind})
                        if answer.status_code == 200 and url.endswith("/kvatlas/select"):
                            return set(answer.json()) == {"worker_id", "required_blocks", "overlap_blocks"}
                        if answer.status_code == 200 and "/kvatlas/" in url:
                            ids.append(answer.json()["id"])
                            return True
                        return answer.status_code == 200 and "x-kvatlas-decision" in answer.headers

                    await until(is_answered, what=f"{url} answers")
                case ["curl", "-s", url] if url.endswith("/metrics"):
                    page = (await client.get(url)).text
                    assert re.search(r'(?m)^kvatlas_proxy_ends_total{.*end="answered".*} [1-9]', page)
                    assert re.search(r"(?m)^kvatlas_proxy_in_flight_tokens{.*} 0", page)
                case ["curl", "-s", url]:
                    assert json.loads((await client.get(url)).text)
                case _:
                    raise AssertionError(f"nothing checks {words}")
        if document == "docs/router.md":
            assert len(done) == 15 and QUESTIONS
            for question in QUESTIONS:
                assert await query(*shlex.split(question)[1:], "--redis-url", redis_url)
        elif document == "docs/fetching.md":
            await _is_fetched(client, router_url)
        else:
            await _goes_apart(client, router_url)


async def _goes_apart(client: httpx.AsyncClient, router_url: str) -> None:
    """Send so many requests that one meets a busy decode worker, and gets its prompt computed by the other worker."""
    number = 0

    async def is_pair() -> bool:
        nonlocal number
        number += 1
        prompts = [[number, n, *([7] * 2_000)] for n in range(8)]
        asked = [
            client.build_request(
                "POST", f"{router_url}/v1/completions", json={"model": "my-model", "prompt": prompt, "max_tokens": 16}
            )
            for prompt in prompts
        ]
        found = []
        async with anyio.create_task_group() as tasks:

            async def ask(request: httpx.Request) -> None:
                found.append(await client.send(request))

            for request in asked:
                tasks.start_soon(ask, request)
        return any('prefill="' in answer.headers.get("x-kvatlas-decision", "") for answer in found)

    await until(is_pair, what="a request goes apart")


async def _is_fetched(client: httpx.AsyncClient, router_url: str) -> None:
    """Send so many requests that for one of them the holder of its document is busy: its worker then fetches the document, and
    finds as much cached as was predicted."""
    document = list(range(1_000, 3_000))  # the caches have space for many of these
    number = 0

    async def ask(tail: int) -> httpx.Response:
        body = {"model": "my-model", "prompt": [number, *document, *([tail] * 200)], "max_tokens": 4}
        return await client.post(f"{router_url}/v1/completions", json=body)

    async def is_known() -> bool:
        return "cached=0;" not in (await ask(0)).headers["x-kvatlas-decision"]

    async def is_fetched() -> bool:
        nonlocal number
        number += 1
        await until(is_known, what="the index has the document")
        found: list[httpx.Response] = []

        async def ask_too(tail: int) -> None:
            found.append(await ask(tail))

        async with anyio.create_task_group() as tasks:
            for tail in range(1, 33):
                tasks.start_soon(ask_too, tail)
        fetched = [answer for answer in found if "source=" in answer.headers["x-kvatlas-decision"]]
        for answer in fetched:
            cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert f";cached={cached};" in answer.headers["x-kvatlas-decision"]
        return bool(fetched)

    await until(is_fetched, what="a request's document is fetched")
