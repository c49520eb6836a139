"""The poller against a real HTTP server."""

from collections.abc import Iterator

import pytest

from kvatlas.fleet.records import EngineKind, EngineState
from publishers.counters import PublisherCounters
from publishers.engines.metrics import LoadContext
from publishers.engines.poller import FAILURES_TO_DOWN, EnginePoller
from tests.publishers.engines.engine_http import EngineHttp, engine_http

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> Iterator[EngineHttp]:
    with engine_http() as served:
        yield served


def poller(engine: EngineHttp, kind: EngineKind = EngineKind.VLLM) -> EnginePoller:
    return EnginePoller(engine.url, LoadContext("w", kind), PublisherCounters())


async def test_an_engine_is_down_until_it_was_seen_healthy(engine: EngineHttp) -> None:
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


async def test_one_unanswered_poll_is_forgiven(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, "")}
    watch = poller(engine)
    await watch.poll_once()
    engine.stop()
    await watch.poll_once()
    assert watch.state.value == "up"
    for _ in range(FAILURES_TO_DOWN):
        await watch.poll_once()
    assert watch.state.value == "down"


async def test_a_sleeping_engine(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, 'vllm:engine_sleep_state{sleep_state="awake"} 0\n')}
    watch = poller(engine)
    await watch.poll_once()
    assert watch.state is EngineState.ASLEEP


async def test_another_process_start_time_is_a_restart(engine: EngineHttp) -> None:
    restarts: list[float | None] = []
    watch = poller(engine)
    watch.on_restart = lambda: restarts.append(watch.process_start_s)
    for start in (1000.5, 1000.5, 2000.25):
        engine.pages = {"/health": (200, ""), "/metrics": (200, f"process_start_time_seconds {start}\n")}
        await watch.poll_once()
    assert restarts == [2000.25]


async def test_an_engine_without_a_metrics_page_is_up(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, "")}
    watch = poller(engine, EngineKind.SGLANG)
    await watch.poll_once()
    assert watch.state is EngineState.UP
    assert watch.load is None


async def test_a_broken_metrics_page_is_counted_and_the_engine_is_up(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, "vllm:num_requests_running{model\n")}
    counters = PublisherCounters()
    watch = EnginePoller(engine.url, LoadContext("w", EngineKind.VLLM), counters)
    await watch.poll_once()
    assert watch.state is EngineState.UP
    assert counters.load_failures == 1


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_tells_its_capacity_elsewhere(engine: EngineHttp, path: str) -> None:
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
