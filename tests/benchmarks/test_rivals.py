"""The lab's model of SGLang's router decides as the router's own wheel does, which `make bench-proxies` installs."""

import http.client
import json
import random
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas_simulator.lab.generated_requests import BLOCK_TOKENS
from kvatlas_simulator.lab.policies.approximate_trees import SglangRouter
from kvatlas_simulator.lab.replay import FleetSettings, build_engines
from kvatlas_simulator.lab.requests import LabRequest
from tests.eventually import until_sync

ROUTER = Path(".bench-proxies/bin/sglang-router")
ENGINES, REQUESTS, CHARACTERS_A_TOKEN = 4, 240, 4


class Engines:
    """Engines that hold every request open until `release` is set. `asked`: the engines that got the completions, in order."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.release = threading.Event()
        self.servers = [self._server(number) for number in range(ENGINES)]
        self.urls = [f"http://127.0.0.1:{server.server_port}" for server in self.servers]

    def _server(self, number: int) -> ThreadingHTTPServer:
        engines = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

            def do_GET(self) -> None:
                self._answer({"data": [{"id": "m", "object": "model"}], "model_path": "m", "served_model_name": "m"})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                engines.asked.append(number)
                engines.release.wait(60)
                self._answer({"id": "c", "object": "text_completion", "choices": [{"index": 0, "text": "x"}]})

            def _answer(self, value: Any) -> None:
                body = json.dumps(value).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        class Server(ThreadingHTTPServer):
            request_queue_size = 256

        server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def have_got(self, requests: int) -> bool:
        return len(self.asked) == requests

    def close(self) -> None:
        self.release.set()
        for server in self.servers:
            server.shutdown()
            server.server_close()


@contextmanager
def sglang_router(urls: list[str]) -> Iterator[int]:
    port = free_port()
    words = ["launch", "--worker-urls", *urls, "--policy", "cache_aware", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-port", str(free_port()), "--log-level", "error", "--max-concurrent-requests", "-1"]
    process = subprocess.Popen([str(ROUTER), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


def complete(port: int, prompt: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=90)) as connection:
        body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        return connection.getresponse().status


def is_ready(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        try:
            connection.request("GET", "/workers")
            listed = json.loads(connection.getresponse().read())["workers"]
        except OSError:
            return False
        return len([one for one in listed if one["is_healthy"]]) == ENGINES


def prompts(rng: random.Random) -> Iterator[LabRequest]:
    """First a new prompt for each engine, then mostly prompts that share a prefix, to several depths."""
    hot, fresh = [*range(1_000, 1_010)], iter(range(10_000, 100_000))
    for number in range(REQUESTS):
        shared = 0 if number < ENGINES or rng.random() < 0.2 else rng.choice([2, 3, 4, 8, 9])
        contents = (*hot[:shared], *(next(fresh) for _ in range(10 - shared)))
        yield LabRequest(number, 0.0, 10 * BLOCK_TOKENS, 1, contents, number)


def text_of(request: LabRequest) -> str:
    """A text for the request; different contents differ from the first letter on."""
    size = BLOCK_TOKENS * CHARACTERS_A_TOKEN
    return "".join((chr(0x4E00 + content % 20_000) * size)[:size] for content in request.contents)


@pytest.mark.skipif(not ROUTER.exists(), reason="sglang-router is installed by `make bench-proxies`")
def test_sglangs_router_decides_as_the_labs_model_of_it() -> None:
    engines = Engines()
    model = SglangRouter(build_engines(FleetSettings(ENGINES, 100_000), BLOCK_TOKENS), random.Random(1))
    order: list[int] = []  # the router's own order, in which ties go to the first
    balanced = matched = 0
    try:
        with sglang_router(engines.urls) as port, ThreadPoolExecutor(REQUESTS) as pool:
            until_sync(lambda: is_ready(port), what="a router with all engines")
            for request in prompts(random.Random(3)):
                pool.submit(complete, port, text_of(request))
                until_sync(partial(engines.have_got, request.number + 1), what="the request at an engine")
                asked = engines.asked[-1]
                if request.number < ENGINES:
                    order.append(asked)
                allowed, chosen = model.allowed(request), order.index(asked)
                assert chosen in allowed, f"request {request.number}: engine {chosen}, not one of {allowed}"
                balanced += max(model.open) - min(model.open) > model.BALANCE_ABS
                matched += allowed != [min(range(ENGINES), key=model.open.__getitem__)]
                model.record(request, chosen)
                model.send(chosen)
            engines.release.set()
    finally:
        engines.close()
    assert balanced > 5 and matched > 20  # both of its rules were seen
