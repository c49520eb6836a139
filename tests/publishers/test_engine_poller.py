"""The poller against a real HTTP server."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from kvatlas.fleet import EngineKind, EngineState
from publishers.counters import PublisherCounters
from publishers.engine_poller import FAILURES_TO_DOWN, EnginePoller
from publishers.load import LoadContext

pytestmark = pytest.mark.anyio


@dataclass
class Engine:
    """What the engine's HTTP server answers now: (status, body) by path; others are 404."""

    server: ThreadingHTTPServer
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = served.pages.get(self.path, (404, ""))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None: ...

    served = Engine(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    thread = Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.stop()
    thread.join()


def poller(engine: Engine, kind: EngineKind = EngineKind.VLLM) -> EnginePoller:
    return EnginePoller(engine.url, LoadContext("w", kind), PublisherCounters())


async def test_an_engine_is_down_until_it_was_seen_healthy(engine: Engine) -> None:
    changes: list[EngineState] = []
    watch = poller(engine)
    watch.on_change = lambda: changes.append(watch.state)
    assert watch.state.value == "down"
    engine.pages = {"/health": (200, ""), "/metrics": (200, "vllm:num_requests_running 3\n")}
    await watch.poll_once()
    assert watch.load is not None
    assert watch.load.running_decodes == 3
    engine.pages["/health"] = (503, "")
    await watch.poll_once()
    await watch.poll_once()
    assert changes == [EngineState.UP, EngineState.DOWN]


async def test_one_unanswered_poll_is_forgiven(engine: Engine) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, "")}
    watch = poller(engine)
    await watch.poll_once()
    engine.stop()
    await watch.poll_once()
    assert watch.state.value == "up"
    for _ in range(FAILURES_TO_DOWN):
        await watch.poll_once()
    assert watch.state.value == "down"


async def test_a_sleeping_engine(engine: Engine) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, 'vllm:engine_sleep_state{sleep_state="awake"} 0\n')}
    watch = poller(engine)
    await watch.poll_once()
    assert watch.state is EngineState.ASLEEP


async def test_another_process_start_time_is_a_restart(engine: Engine) -> None:
    restarts: list[float | None] = []
    watch = poller(engine)
    watch.on_restart = lambda: restarts.append(watch.process_start_s)
    for start in (1000.5, 1000.5, 2000.25):
        engine.pages = {"/health": (200, ""), "/metrics": (200, f"process_start_time_seconds {start}\n")}
        await watch.poll_once()
    assert restarts == [2000.25]


async def test_an_engine_without_a_metrics_page_is_up(engine: Engine) -> None:
    engine.pages = {"/health": (200, "")}
    watch = poller(engine, EngineKind.SGLANG)
    await watch.poll_once()
    assert watch.state is EngineState.UP
    assert watch.load is None


async def test_a_broken_metrics_page_is_counted_and_the_engine_is_up(engine: Engine) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, "vllm:num_requests_running{model\n")}
    counters = PublisherCounters()
    watch = EnginePoller(engine.url, LoadContext("w", EngineKind.VLLM), counters)
    await watch.poll_once()
    assert watch.state is EngineState.UP
    assert counters.load_failures == 1


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_tells_its_capacity_elsewhere(engine: Engine, path: str) -> None:
    engine.pages = {
        "/health": (200, ""),
        "/metrics": (200, "sglang:token_usage 0.5\n"),
        path: (
            200,
            '{"max_running_requests": 32, "max_total_num_tokens": 6400, "page_size": 64, "internal_states": []}',
        ),
    }
    watch = poller(engine, EngineKind.SGLANG)
    await watch.poll_once()
    assert watch.load is not None
    metrics = watch.load.forward_pass
    assert (metrics.total_kv_blocks, metrics.active_kv_blocks, metrics.total_request_slots) == (100, 50, 32)
