"""The commands together, as a user would run them: an engine, its sidecar, an indexer, and queries."""

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from tests.eventually import until_sync
from tests.kvatlas_cli.conftest import Cli, start_command

PROMPT = list(range(1000, 1200))
BLOCK_SIZE = 16


@contextmanager
def running(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run a service, which must stop cleanly on SIGTERM without a traceback."""
    process = start_command(*words, **variables)
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr as errors:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            remaining = errors.read()
            code = process.wait(timeout=30)
    assert code == 0 and "Traceback" not in remaining, remaining


def wait_for_line(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The match in the first line of a service's stderr that contains the pattern."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"ended without a line {pattern!r}")


@pytest.fixture
def engine() -> Iterator[tuple[str, str, str]]:
    """The HTTP, event and replay addresses of a simulated engine."""
    words = ["--model", "m", "--port", "0", "--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"]
    with running("simulate-engine", *words, "--speed-up", "1000") as process:
        found = wait_for_line(process, r"engine at (\S+); events on (\S+), replay on (\S+)")
        yield found[1], found[2], found[3]


def complete(engine_url: str) -> None:
    answer = httpx.post(
        f"{engine_url}/v1/completions", json={"model": "m", "prompt": PROMPT, "max_tokens": 4}, timeout=30
    )
    answer.raise_for_status()


def check_queries(cli: Cli, redis_url: str, worker_id: str, engine_url: str) -> None:
    """Check that the blocks that the engine computed are found by their token ids."""
    blocks = len(PROMPT) // BLOCK_SIZE

    def held() -> bool:
        done = cli("export", "--worker", worker_id, "--redis-url", redis_url)
        return done.code == 0 and len(done.out.splitlines()) >= blocks

    until_sync(held, what="the engine's blocks in the index")
    words = ["--tokens", "-", "--model-id", "m", "--json", "--redis-url", redis_url]

    def routed() -> bool:
        done = cli("route", *words, stdin=json.dumps(PROMPT))
        if done.code != 0:
            return False
        answer = json.loads(done.out)
        return bool(answer["url"] == engine_url and answer["candidates"][0]["overlap_blocks"] == blocks)

    until_sync(routed, what="the worker picked for its blocks")
    (overlap,) = json.loads(cli("overlap", *words, stdin=json.dumps(PROMPT)).out)["workers"]
    assert (overlap["worker"], overlap["resident_blocks"], overlap["block_size"]) == (worker_id, blocks, BLOCK_SIZE)
    (worker,) = json.loads(cli("workers", "--json", "--redis-url", redis_url).out)
    assert worker["worker"] == worker_id and worker["state"] == "up" and worker["blocks"] >= blocks


def test_up_publishes_a_described_engine(cli: Cli, engine: tuple[str, str, str]) -> None:
    url, endpoint, replay = engine
    with running("up", "--json", "--engine", f"{url},endpoint={endpoint},replay={replay},worker=w1") as process:
        assert process.stdout is not None
        printed = json.loads(process.stdout.readline())
        assert printed["workers"] == ["w1"]
        complete(url)
        check_queries(cli, printed["redis_url"], "w1", url)


def test_up_discovers_an_engine_and_a_router_sends_requests_to_it(cli: Cli, engine: tuple[str, str, str]) -> None:
    url, _, _ = engine
    with running("up", "--json", "--engine", url) as process:
        assert process.stdout is not None
        printed = json.loads(process.stdout.readline())
        (worker_id,) = printed["workers"]
        complete(url)
        check_queries(cli, printed["redis_url"], worker_id, url)
        with running("router", "--port", "0", KVATLAS_REDIS_URL=printed["redis_url"]) as router:
            at = wait_for_line(router, r"router at (\S+);")[1]
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
            answer = httpx.post(f"{at}/v1/completions", json=body, timeout=30)
            assert answer.headers["x-kvatlas-decision"].startswith(f'"{worker_id}";cached=192;prompt=200')
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


def test_up_with_a_router_answers_requests_and_leaves_nothing_behind(engine: tuple[str, str, str]) -> None:
    url, _, _ = engine
    ports = [f"--{name}-port=0" for name in ("router", "nats", "redis", "status")]
    with running("up", "--json", "--router", *ports, "--engine", f"{url},worker=w1") as process:
        assert process.stdout is not None
        printed = json.loads(process.stdout.readline())
        at = printed["router_url"]
        assert urlsplit(at).hostname == "127.0.0.1"
        message = {"role": "user", "content": "How do I change my address?"}
        answer = httpx.post(f"{at}/v1/chat/completions", json={"model": "m", "messages": [message]}, timeout=30)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        assert answer.headers["x-kvatlas-decision"].startswith('"w1";cached=0;')

        def finds_the_blocks() -> bool:
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
            decision = httpx.post(f"{at}/v1/completions", json=body, timeout=30).headers["x-kvatlas-decision"]
            return decision.startswith('"w1";cached=192;prompt=200')

        until_sync(finds_the_blocks, deadline_s=30, what="the prompt's blocks in a choice")
        metrics = httpx.get(f"{at}/metrics", timeout=30).text
        assert "kvatlas_router_" in metrics and "kvatlas_indexer_" in metrics
    for each in (at, printed["nats_url"], printed["redis_url"]):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", urlsplit(each).port or 0), timeout=5)


def test_a_second_indexer_and_a_separate_sidecar_work(cli: Cli, engine: tuple[str, str, str]) -> None:
    url, endpoint, replay = engine
    complete(url)
    with running("up", "--json") as servers:
        assert servers.stdout is not None
        printed = json.loads(servers.stdout.readline())
        variables = {"KVATLAS_NATS_URL": printed["nats_url"], "KVATLAS_REDIS_URL": printed["redis_url"]}
        flags = ["--engine", "vllm", "--endpoint", endpoint, "--replay-endpoint", replay, "--engine-url", url]
        with (
            running("indexer", "--member-id", "second", **variables) as indexer,
            running("publish", *flags, "--worker-id", "w2", "--model-id", "m", **variables) as sidecar,
        ):
            wait_for_line(indexer, "indexer second is ready")
            wait_for_line(sidecar, "worker w2 is published")
            check_queries(cli, printed["redis_url"], "w2", url)
        silent = ["--engine", "vllm", "--no-events", "--engine-url", url, "--worker-id", "w3", "--model-id", "m"]
        with running("publish", *silent, "--dp-size", "2", **variables) as sidecar:
            # an engine's ranks start concurrently: either may be first
            first = wait_for_line(sidecar, r"worker w3-dp([01]) is published")[1]
            wait_for_line(sidecar, f"worker w3-dp{1 - int(first)} is published")
