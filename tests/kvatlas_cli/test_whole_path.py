"""The commands together, as a user runs them: an engine, its sidecar, an indexer, and questions."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.eventually import until_sync
from tests.kvatlas_cli.conftest import Cli, child

PROMPT = list(range(1000, 1200))
BLOCK_SIZE = 16


@contextmanager
def running(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A service; it must stop cleanly on SIGTERM, with nothing but lines of its own on stderr."""
    process = child(*words, **variables)
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr as errors:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            rest = errors.read()
            code = process.wait(timeout=30)
    assert code == 0 and "Traceback" not in rest, rest


def line_of(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """The first line on a service's stderr that has the pattern."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"ended without saying {pattern!r}")


@pytest.fixture
def engine() -> Iterator[tuple[str, str, str]]:
    """A simulated engine's HTTP, event and replay address."""
    words = ["--model", "m", "--port", "0", "--endpoint", "tcp://127.0.0.1:0", "--replay-endpoint", "tcp://127.0.0.1:0"]
    with running("simulate-engine", *words, "--speed-up", "1000") as process:
        found = line_of(process, r"engine at (\S+); events on (\S+), replay on (\S+)")
        yield found[1], found[2], found[3]


def complete(engine_url: str) -> None:
    answer = httpx.post(
        f"{engine_url}/v1/completions", json={"model": "m", "prompt": PROMPT, "max_tokens": 4}, timeout=30
    )
    answer.raise_for_status()


def check_questions(cli: Cli, redis_url: str, worker_id: str, engine_url: str) -> None:
    """What the engine computed is found by who knows only the token ids."""
    blocks = len(PROMPT) // BLOCK_SIZE

    def held() -> bool:
        done = cli("export", "--worker", worker_id, "--redis-url", redis_url)
        return done.code == 0 and len(done.out.splitlines()) >= blocks

    until_sync(held, deadline_s=30, what="the engine's blocks in the index")
    words = ["--tokens", "-", "--model-id", "m", "--json", "--redis-url", redis_url]

    def routed() -> bool:
        done = cli("route", *words, stdin=json.dumps(PROMPT))
        if done.code != 0:
            return False
        answer = json.loads(done.out)
        return bool(answer["url"] == engine_url and answer["candidates"][0]["overlap_blocks"] == blocks)

    until_sync(routed, deadline_s=30, what="the worker picked for its blocks")
    (overlap,) = json.loads(cli("overlap", *words, stdin=json.dumps(PROMPT)).out)["workers"]
    assert (overlap["worker"], overlap["resident_blocks"], overlap["block_size"]) == (worker_id, blocks, BLOCK_SIZE)
    (worker,) = json.loads(cli("workers", "--json", "--redis-url", redis_url).out)
    assert worker["worker"] == worker_id and worker["state"] == "up" and worker["blocks"] >= blocks


def test_up_with_an_engine(cli: Cli, engine: tuple[str, str, str]) -> None:
    url, endpoint, replay = engine
    with running("up", "--json", "--engine", f"{url},endpoint={endpoint},replay={replay},worker=w1") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["workers"] == ["w1"]
        complete(url)
        check_questions(cli, told["redis_url"], "w1", url)


def test_up_finds_out_what_an_engine_offers_and_a_router_answers_for_it(cli: Cli, engine: tuple[str, str, str]) -> None:
    url, _, _ = engine
    with running("up", "--json", "--engine", url) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        (worker_id,) = told["workers"]
        complete(url)
        check_questions(cli, told["redis_url"], worker_id, url)
        with running("router", "--port", "0", KVATLAS_REDIS_URL=told["redis_url"]) as router:
            at = line_of(router, r"router at (\S+);")[1]
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
            answer = httpx.post(f"{at}/v1/completions", json=body, timeout=30)
            assert answer.headers["x-kvatlas-decision"].startswith(f'"{worker_id}";cached=192;prompt=200')
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


def test_an_indexer_and_a_sidecar_of_their_own(cli: Cli, engine: tuple[str, str, str]) -> None:
    url, endpoint, replay = engine
    complete(url)
    with running("up", "--json") as servers:
        assert servers.stdout is not None
        told = json.loads(servers.stdout.readline())
        variables = {"KVATLAS_NATS_URL": told["nats_url"], "KVATLAS_REDIS_URL": told["redis_url"]}
        flags = ["--engine", "vllm", "--endpoint", endpoint, "--replay-endpoint", replay, "--engine-url", url]
        with (
            running("indexer", "--member-id", "second", **variables) as indexer,
            running("publish", *flags, "--worker-id", "w2", "--model-id", "m", **variables) as sidecar,
        ):
            line_of(indexer, "indexer second is ready")
            line_of(sidecar, "worker w2 is published")
            check_questions(cli, told["redis_url"], "w2", url)
        silent = ["--engine", "vllm", "--no-events", "--engine-url", url, "--worker-id", "w3", "--model-id", "m"]
        with running("publish", *silent, "--dp-size", "2", **variables) as sidecar:
            line_of(sidecar, "worker w3-dp0 is published")
            line_of(sidecar, "worker w3-dp1 is published")
