"""The poller against a real HTTP server."""

import json
from collections.abc import Callable, Iterator

import pytest

from kvatlas.engine_access import EngineAccess
from kvatlas.fleet.records import EngineKind, EngineState
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engines.metrics import LoadContext
from kvatlas_publishers.engines.poller import FAILURES_TO_DOWN, EnginePoller
from tests.publishers.engines.engine_http import EngineHttp, engine_http

pytestmark = pytest.mark.anyio


@pytest.fixture
def engine() -> Iterator[EngineHttp]:
    with engine_http() as served:
        yield served


def make_poller(
    engine: EngineHttp,
    kind: EngineKind = EngineKind.VLLM,
    *,
    on_change: Callable[[EngineState], None] = lambda _: None,
    on_restart: Callable[[], None] = lambda: None,
) -> EnginePoller:
    context, counters = LoadContext("w", kind), PublisherCounters()
    return EnginePoller(engine.url, context, counters, Diagnoses("w"), on_change=on_change, on_restart=on_restart)


async def test_an_engine_is_down_until_it_was_healthy_once(engine: EngineHttp) -> None:
    changes: list[EngineState] = []
    poller = make_poller(engine, on_change=changes.append)
    assert poller.state.value == "down"
    engine.pages = {"/health": (200, ""), "/metrics": (200, "vllm:num_requests_running 3\n")}
    await poller.poll_once()
    assert poller.load is not None
    assert poller.load.running_decodes == 3
    engine.pages["/health"] = (503, "")
    await poller.poll_once()
    await poller.poll_once()
    assert changes == [EngineState.UP, EngineState.DOWN]


async def test_one_unanswered_poll_is_forgiven(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, "")}
    poller = make_poller(engine)
    await poller.poll_once()
    engine.stop()
    await poller.poll_once()
    assert poller.state.value == "up"
    for _ in range(FAILURES_TO_DOWN):
        await poller.poll_once()
    assert poller.state.value == "down"


async def test_a_health_page_that_waits_behind_a_prompt_takes_no_engine_down(
    engine: EngineHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvatlas_publishers.engines.poller.ANSWER_S", 0.3)
    engine.pages = {"/health": (200, ""), "/metrics": (200, "vllm:num_requests_running 1\n")}
    poller = make_poller(engine)
    engine.late = {"/health"}
    await poller.poll_once()
    assert poller.state.value == "down"  # it has never been up
    engine.late = set()
    await poller.poll_once()
    engine.late = {"/health"}
    for _ in range(FAILURES_TO_DOWN + 1):
        await poller.poll_once()
        assert poller.state is EngineState.UP
    engine.late = {"/health", "/metrics"}
    for _ in range(FAILURES_TO_DOWN):
        await poller.poll_once()
    assert poller.state.value == "down"
    engine.late = set()


@pytest.mark.parametrize(
    ("metric", "calls"),
    [("sglang:swa_token_usage", 1), ("sglang:mamba_available_tokens", 1), ("sglang:token_usage", 0)],
)
async def test_metrics_of_another_cache_show_a_hybrid_model(engine: EngineHttp, metric: str, calls: int) -> None:
    """SGLang has these on every page, at 0 if the model has no such attention."""
    found: list[None] = []
    context = LoadContext("w", EngineKind.SGLANG)
    poller = EnginePoller(
        engine.url, context, PublisherCounters(), Diagnoses("w"), on_hybrid=lambda: found.append(None)
    )
    for value in (0.0, 0.5, 0.25):
        engine.pages = {"/health": (200, ""), "/metrics": (200, f"sglang:mamba_usage 0.0\n{metric} {value}\n")}
        await poller.poll_once()
        assert len(found) == (calls if value else 0)


async def test_a_sleeping_engine_is_asleep(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, 'vllm:engine_sleep_state{sleep_state="awake"} 0\n')}
    poller = make_poller(engine)
    await poller.poll_once()
    assert poller.state is EngineState.ASLEEP


async def test_an_adapter_with_another_root_has_moved(engine: EngineHttp) -> None:
    moved: list[str] = []
    context = LoadContext("w", EngineKind.VLLM)
    poller = EnginePoller(engine.url, context, PublisherCounters(), Diagnoses("w"), on_adapter_moved=moved.append)
    engine.pages = {"/health": (200, ""), "/metrics": (200, "")}
    for root in ("/a", "/a", None, "/b", "/b"):
        cards: list[dict[str, object]] = [{"id": "m", "root": "/m", "parent": None}]
        cards += [{"id": "lora", "root": root, "parent": "m"}, {"id": 5, "root": 5, "parent": "m"}] if root else []
        engine.pages["/v1/models"] = (200, json.dumps({"data": cards}))
        await poller.poll_once()
    engine.pages["/v1/models"] = (200, "[5]")
    await poller.poll_once()
    assert moved == ["lora"]


@pytest.mark.parametrize(("kind", "page"), [(EngineKind.VLLM, "/weight_info"), (EngineKind.SGLANG, "/get_model_info")])
async def test_another_weight_version_is_new_weights(engine: EngineHttp, kind: EngineKind, page: str) -> None:
    found: list[str] = []
    context = LoadContext("w", kind)
    poller = EnginePoller(engine.url, context, PublisherCounters(), Diagnoses("w"), on_new_weights=found.append)
    engine.pages = {"/health": (200, ""), "/metrics": (200, "")}
    for answer in ('{"weight_version": "a"}', '{"weight_version": "a"}', "[5]", '{"weight_version": "b"}', "{}"):
        engine.pages[page] = (200, answer)
        await poller.poll_once()
    assert found == ["b"]


async def test_another_process_start_time_is_a_restart(engine: EngineHttp) -> None:
    restarts: list[float | None] = []
    poller = make_poller(engine, on_restart=lambda: restarts.append(poller.process_start_s))
    for start in (1000.5, 1000.5, 2000.25):
        engine.pages = {"/health": (200, ""), "/metrics": (200, f"process_start_time_seconds {start}\n")}
        await poller.poll_once()
    assert restarts == [2000.25]


async def test_an_engine_without_a_metrics_page_is_up(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, "")}
    poller = make_poller(engine, EngineKind.SGLANG)
    await poller.poll_once()
    assert poller.state is EngineState.UP
    assert poller.load is None


@pytest.mark.parametrize("page", ["vllm:num_requests_running +Inf\n", "#" * (9 << 20)], ids=["infinite", "9 MiB"])
async def test_an_impossible_metrics_page_is_counted_and_polling_goes_on(engine: EngineHttp, page: str) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, page)}
    counters = PublisherCounters()
    poller = EnginePoller(engine.url, LoadContext("w", EngineKind.VLLM), counters, Diagnoses("w"))
    await poller.poll_once()
    assert counters.load_failures == 1 and poller.load is None
    engine.pages["/metrics"] = (200, "vllm:num_requests_running 3\n")
    await poller.poll_once()
    assert poller.load is not None and poller.state is EngineState.UP


async def test_a_broken_metrics_page_is_counted_and_the_engine_is_up(engine: EngineHttp) -> None:
    engine.pages = {"/health": (200, ""), "/metrics": (200, "vllm:num_requests_running{model\n")}
    counters = PublisherCounters()
    poller = EnginePoller(engine.url, LoadContext("w", EngineKind.VLLM), counters, Diagnoses("w"))
    await poller.poll_once()
    assert poller.state is EngineState.UP
    assert counters.load_failures == 1


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_has_its_capacity_on_another_page(engine: EngineHttp, path: str) -> None:
    engine.pages = {
        "/health": (200, ""),
        "/metrics": (200, "sglang:token_usage 0.5\n"),
        path: (
            200,
            '{"max_running_requests": 32, "max_total_num_tokens": 6400, "page_size": 64, "internal_states": []}',
        ),
    }
    poller = make_poller(engine, EngineKind.SGLANG)
    await poller.poll_once()
    assert poller.load is not None
    metrics = poller.load.forward_pass
    assert (metrics.total_kv_blocks, metrics.active_kv_blocks, metrics.total_request_slots) == (100, 50, 32)


async def test_an_engine_that_refuses_calls_is_diagnosed_until_it_takes_them(engine: EngineHttp) -> None:
    diagnoses = Diagnoses("w")
    context = LoadContext("w", EngineKind.VLLM)
    poller = EnginePoller(engine.url, context, PublisherCounters(), diagnoses)
    engine.pages = {"/health": (200, ""), "/metrics": (200, ""), "/v1/models": (401, "")}
    await poller.poll_once()
    (found,) = diagnoses.current
    assert "status 401 for /v1/models" in found.seen and "--engine-key-file" in found.cure
    assert poller.state is EngineState.UP
    engine.pages["/v1/models"] = (200, '{"data": []}')
    await poller.poll_once()
    assert not diagnoses.current


async def test_a_poll_carries_the_workers_key(engine: EngineHttp) -> None:
    engine.key = "sk-one"
    access = EngineAccess.parse("w sk-one\nsk-others")
    poller = EnginePoller(
        engine.url, LoadContext("w", EngineKind.VLLM), PublisherCounters(), Diagnoses("w"), access=access
    )
    engine.pages = {"/health": (200, ""), "/metrics": (200, ""), "/v1/models": (200, '{"data": [{"id": "m"}]}')}
    await poller.poll_once()
    assert poller.state is EngineState.UP and poller.served_names == ("m",)
