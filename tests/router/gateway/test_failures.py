"""The effects of a failing picker, engine or gateway, by how much of an answer the picker follows; and refusals."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import Store
from kvatlas_router.gateway.service import run_endpoint_picker
from tests.end_to_end.processes import environment, kvatlas_command, line_with
from tests.eventually import until
from tests.router.gateway.echo_engine import echo_engine
from tests.router.gateway.envoy import EnvoyProcess
from tests.router.gateway.gateway import (
    PROMPT,
    health,
    picker_settings,
    running_gateway,
    running_picker,
    until_health_is,
    worker_of,
)
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import MODEL, SCOPE
from tests.router.proxy.faulty_engine import faulty_engine, well

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}
SLOW = {"speed_up": 1, "decode_step_us": 30_000}
SHARED_TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    ("listener", "mode", "answered", "left", "compared"),
    [
        ("headers", "whole", 1, 1, 0),
        ("headers and trailers", "whole", 1, 1, 0),
        ("buffered", "whole", 2, 0, 2),
        ("buffered, override", "headers", 2, 0, 0),
        ("whole", "none", 2, 0, 2),  # Envoy would lose an answer that comes before the picker has left
        ("headers", "none", 0, 2, 0),
        ("tls", "whole", 2, 0, 2),
    ],
)
async def test_however_much_of_an_answer_is_followed_it_passes_and_its_booking_ends(
    envoy: EnvoyProcess,
    store: Store,
    valkey_url: str,
    listener: str,
    mode: str,
    answered: int,
    left: int,
    compared: int,
) -> None:
    tls = listener == "tls"
    port = envoy.ports.picker_tls if tls else envoy.ports.picker
    async with (
        running_gateway(envoy, store, {"w1": {}}) as gateway,
        running_picker(valkey_url, port=port, plaintext=not tls, response_mode=mode) as picker,
    ):
        client = gateway[listener]
        whole = await client.post("/v1/completions", json=ASK)
        assert whole.status_code == 200 and whole.json()["usage"]["prompt_tokens"] == len(PROMPT)
        # in buffered mode, the picker can't leave out an event, so there is a usage only if the client asks for it
        asked = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
        streamed = await client.post("/v1/completions", json=asked)
        assert streamed.status_code == 200 and streamed.text.endswith("data: [DONE]\n\n")
        await gateway.nothing_is_booked()
        counters = picker.counters
        assert (counters.answered, counters.left, counters.gone) == (answered, left, 0)
        assert picker.client.answers.counts.prompts_equal == compared


@asynccontextmanager
async def picker_process(valkey_url: str, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    words = ["epp", "--redis-url", valkey_url, "--port", str(port), "--health-port", "0", "--plaintext"]
    words += ["--processes", "2", "--tokenizer", "none"]
    process = await asyncio.create_subprocess_exec(
        *kvatlas_command(*words), stderr=asyncio.subprocess.PIPE, env=environment()
    )
    try:
        for _ in range(2):
            await line_with(f"endpoint picker on port {port}", process.stderr)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_killed_picker_cuts_only_answers_that_pass_through_it_and_another_takes_over(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with running_gateway(envoy, store, {"w1": SLOW}) as gateway:
        body = {**ASK, "max_tokens": 40, "stream": True}
        async with (
            picker_process(valkey_url, envoy.ports.picker) as process,
            gateway["open"].stream("POST", "/v1/completions", json=body) as through,
            gateway["headers"].stream("POST", "/v1/completions", json=body) as beside,
        ):
            assert (through.status_code, beside.status_code) == (200, 200)
            lines, others = through.aiter_lines(), beside.aiter_lines()
            assert (await anext(lines)).startswith("data: ") and (await anext(others)).startswith("data: ")
            process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                async for _ in lines:
                    pass
            assert [line async for line in others if line][-1] == "data: [DONE]"
        for listener, status in (("whole", 500), ("buffered", 500), ("buffered, open", 200)):
            assert (await gateway[listener].post("/v1/completions", json=ASK)).status_code == status, listener
        # in full duplex, a gateway fails open only until a piece of the body has been sent
        assert (await gateway["open"].post("/v1/completions", json=ASK)).status_code in (200, 500)
        async with running_picker(valkey_url, port=envoy.ports.picker):
            # the killed picker's bookings expire with its lease, like those of a killed router
            assert (await gateway["open"].post("/v1/completions", json=ASK)).status_code == 200


async def test_a_process_of_several_that_crashes_is_started_again(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with (
        running_gateway(envoy, store, {"w1": {}}) as gateway,
        picker_process(valkey_url, envoy.ports.picker) as process,
    ):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[0]), signal.SIGKILL)
        await line_with("was ended by signal 9; starting another", process.stderr)
        await line_with("endpoint picker on port", process.stderr)
        assert (await gateway["whole"].post("/v1/completions", json=ASK)).status_code == 200


async def test_a_decision_that_takes_too_long_is_a_refusal(envoy: EnvoyProcess, store: Store, valkey_url: str) -> None:
    async with (
        running_gateway(envoy, store, {"w1": {}}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker, pick_deadline_ms=0.01) as picker,
    ):
        refused = await gateway["whole"].post("/v1/completions", json=ASK)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "no decision within 0.01 ms" in refused.json()["error"]["message"]
        await gateway.nothing_is_booked()
        assert picker.counters.late == 1


async def test_a_stopped_picker_is_not_ready_first_and_ends_what_runs(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with running_gateway(envoy, store, {"w1": SLOW}) as gateway, anyio.create_task_group() as tasks:
        found: list[Any] = []
        settings = picker_settings(valkey_url, port=envoy.ports.picker, drain_s=1, grace_s=10)
        stopping = anyio.CancelScope()

        async def run() -> None:
            with stopping:
                await run_endpoint_picker(settings, found.append)
            running_task.clear()

        running_task = [True]
        tasks.start_soon(run)
        await until(lambda: found, what="the picker listens")
        server = found[0].server
        names = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "inference-extension")
        for port in (server.port, server.health_port):
            for name in (*names, "liveness"):
                await until_health_is(port, name, "SERVING")
            assert await health(port, "nosuch") == "NOT_FOUND"
        body = {**ASK, "max_tokens": 100, "stream": True}
        async with gateway["headers and trailers"].stream("POST", "/v1/completions", json=body) as running:
            assert running.status_code == 200
            stopping.cancel()
            for name in names:
                await until_health_is(server.health_port, name, "NOT_SERVING")
            assert await health(server.health_port, "liveness") == "SERVING"
            assert (await gateway["whole"].post("/v1/completions", json=ASK)).status_code == 200
            assert [line async for line in running.aiter_lines() if line][-1] == "data: [DONE]"
        counters = found[0].counters
        await until(lambda: not running_task, what="the picker has ended")
        # it ended with the answer, after its headers
        assert (counters.answered, counters.left, counters.gone) == (2, 0, 0)
        await gateway.nothing_is_booked()


async def test_a_worker_that_fails_is_left_alone_as_the_proxy_leaves_it(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async def fail(_: Request) -> Response:
        return JSONResponse({"error": {"message": "out of memory"}}, 500)

    async with faulty_engine(fail) as broken:
        reports = {"w3": {"url": broken.url}}
        async with (
            running_gateway(envoy, store, {"w1": {}}, reports) as gateway,
            running_picker(valkey_url, port=envoy.ports.picker) as picker,
        ):
            await gateway.fleet.holds("w3", PROMPT)

            async def is_ejected() -> bool:
                answer = await gateway["whole"].post("/v1/completions", json=ASK)
                return answer.status_code == 200 and worker_of(answer) == "w1"

            await until(is_ejected, what="requests go to the worker that answers")
            assert picker.counters.failed == broken.asked > 0
            await gateway.nothing_is_booked()


async def test_a_request_for_an_adapter_goes_to_the_worker_that_has_it(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with faulty_engine(well) as first, faulty_engine(well) as second:
        second.adapters = ["sql"]
        reports = {"w1": {"url": first.url}, "w2": {"url": second.url}}
        async with (
            running_gateway(envoy, store, {}, reports) as gateway,
            running_picker(valkey_url, port=envoy.ports.picker, tokenizer="none"),
        ):
            for number in range(8):
                body = {**ASK, "model": "sql", "prompt": [number, *PROMPT]}
                answer = await gateway["whole"].post("/v1/completions", json=body)
                assert answer.status_code == 200 and worker_of(answer) == "w2"
            assert first.asked == 0 and second.asked == 8
            await gateway.nothing_is_booked()


async def test_requests_wait_for_room_and_too_many_are_refused(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    full = {"w1": {"running_decodes": 8, "forward_pass": {"active_request_slots": 8, "total_request_slots": 8}}}
    async with (
        running_gateway(envoy, store, {"w1": {}}, full) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker, queue_requests=1, queue_wait_s=0.3) as picker,
    ):
        post = partial(gateway["whole"].post, "/v1/completions", json=ASK)
        refused = await asyncio.gather(post(), post())
        assert {answer.status_code for answer in refused} == {429}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        await gateway.nothing_is_booked()
        assert picker.counters.queue_full == 2


async def test_an_answer_says_how_its_request_waited(envoy: EnvoyProcess, store: Store, valkey_url: str) -> None:
    slots = {"active_request_slots": 1, "total_request_slots": 1}
    full: dict[str, Any] = {"running_decodes": 1, "forward_pass": slots}
    async with (
        running_gateway(envoy, store, {"w1": {}}, {"w1": full}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker, queue_requests=1, queue_wait_s=60),
        anyio.create_task_group() as tasks,
    ):
        answers: list[httpx.Response] = []

        async def post() -> None:
            answers.append(await gateway["whole"].post("/v1/completions", json=ASK))

        async def waits() -> bool:
            await gateway.fleet.report("w1", **full)  # a report is believed for some seconds
            return (await RedisReservations(store).turns(SCOPE.pool_id, "other", [], [])).requests == 1

        tasks.start_soon(post)
        await until(waits, what="the request waits")
        await gateway.fleet.report("w1", running_decodes=0, forward_pass={**slots, "active_request_slots": 0})
        await until(lambda: bool(answers), what="it is answered")
        assert answers[0].status_code == 200
        waited = answers[0].headers["x-kvatlas-queue"]
        assert waited.startswith("full;ahead=0;waiting=1;waited-ms=") and waited.endswith(";by=pool")


async def test_a_trace_goes_on_through_the_picker_to_the_engine(
    envoy: EnvoyProcess, store: Store, valkey_url: str, spans: InMemorySpanExporter
) -> None:
    url = f"http://127.0.0.1:{envoy.ports.engines[0]}"
    async with (
        running_gateway(envoy, store, {}, {"w1": {"url": url}}) as gateway,
        echo_engine(envoy.ports.engines[0]) as engine,
        running_picker(valkey_url, port=envoy.ports.picker, tokenizer="none"),
    ):
        headers = {"traceparent": f"00-{SHARED_TRACE}-b7ad6b7169203331-01"}
        assert (await gateway["whole"].post("/v1/completions", json=ASK, headers=headers)).status_code == 200
        await gateway.nothing_is_booked()
        ((received, _),) = engine.requests
        version, trace_id, span_id, _ = received["traceparent"].split("-")
        assert (version, trace_id) == ("00", SHARED_TRACE)

        async def is_exported() -> bool:
            own = {span.name: span for span in spans.get_finished_spans()}.get("POST /v1/completions")
            return own is not None and own.context is not None and f"{own.context.span_id:016x}" == span_id

        await until(is_exported, what="the picker's span is exported")


async def test_an_engine_that_hangs_gets_no_requests_until_it_computes_again(
    envoy: EnvoyProcess, store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_bounds(monkeypatch, unknown_s=1)
    async with (
        running_gateway(envoy, store, {"w1": {}, "w2": {}}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker) as picker,
    ):
        client, stalled_by_pool = gateway["whole"], picker.client.answers.stalled_by_pool
        await gateway.fleet.holds("w1", PROMPT)
        assert worker_of(await client.post("/v1/completions", json=ASK)) == "w1"
        await gateway.fleet.clients["w1"].post("/hang")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                partial(client.post, "/v1/completions", json=ASK)
            )  # it waits at the engine: that is Envoy's
            await until(lambda: list(stalled_by_pool().values()) == [("w1",)], what="it is found")
            for _ in range(4):
                assert worker_of(await client.post("/v1/completions", json=ASK)) == "w2"
            await gateway.fleet.clients["w1"].post("/resume")
            await until(lambda: not stalled_by_pool(), what="it is back")
