"""What the picker learns from answers that pass through Envoy: errors with status 200, ends, and objects that engines keep."""

from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvatlas.store.connection import Store
from tests.eventually import until
from tests.router.answers.test_answer_errors import DONE, ERROR, PART, PING, SAID, says, streams
from tests.router.engine_objects.test_object_holders import keeper
from tests.router.gateway.envoy import EnvoyProcess
from tests.router.gateway.gateway import PROMPT, running_gateway, running_picker, worker_of
from tests.router.proxy.engines import MODEL
from tests.router.proxy.faulty_engine import faulty_engine

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 5}


@pytest.mark.parametrize("form", ["stream", "comment", "json"])
async def test_a_worker_that_answers_with_errors_is_left_alone(
    envoy: EnvoyProcess, store: Store, valkey_url: str, form: str
) -> None:
    forms = {"stream": streams(ERROR, DONE), "comment": streams(PING, PART, ERROR), "json": says({"error": SAID})}
    async with faulty_engine(forms[form]) as broken:
        reports = {"w3": {"url": broken.url}}
        async with (
            running_gateway(envoy, store, {"w1": {}}, reports) as gateway,
            running_picker(valkey_url, port=envoy.ports.picker) as picker,
        ):
            await gateway.fleet.holds("w3", PROMPT)

            async def is_ejected() -> bool:
                answer = await gateway["whole"].post("/v1/completions", json={**ASK, "stream": form != "json"})
                assert answer.status_code == 200
                return worker_of(answer) == "w1" and "error" not in answer.text

            await until(is_ejected, what="requests go to the worker that answers")
            assert picker.counters.failed == broken.asked > 0
            await gateway.nothing_is_booked()


async def test_a_client_that_leaves_at_the_end_is_answered(envoy: EnvoyProcess, store: Store, valkey_url: str) -> None:
    left = anyio.Event()

    async def answer(_: Request) -> Response:
        async def body() -> Any:
            yield PART
            yield b": bye\ndata:[DONE]\n\n"
            await left.wait()

        return StreamingResponse(body(), media_type="text/event-stream")

    async with (
        faulty_engine(answer) as engine,
        running_gateway(envoy, store, {}, {"w1": {"url": engine.url}}) as gateway,
        running_picker(valkey_url, port=envoy.ports.picker) as picker,
    ):
        async with gateway["whole"].stream("POST", "/v1/completions", json={**ASK, "stream": True}) as streamed:
            async for part in streamed.aiter_raw():
                if b"[DONE]" in part:
                    break
        await until(lambda: picker.counters.answered + picker.counters.gone, what="the picker knows of the end")
        assert (picker.counters.answered, picker.counters.gone) == (1, 0)
        left.set()


async def test_requests_for_an_object_go_to_the_worker_that_keeps_it(
    envoy: EnvoyProcess, store: Store, valkey_url: str
) -> None:
    async with faulty_engine(keeper("w1")) as first, faulty_engine(keeper("w2")) as second:
        reports = {"w1": {"url": first.url}, "w2": {"url": second.url}}
        async with (
            running_gateway(envoy, store, {}, reports) as gateway,
            running_picker(valkey_url, port=envoy.ports.picker, tokenizer="none"),
        ):
            ask: dict[str, Any] = {"model": MODEL, "input": "Hi"}
            for _ in range(5):
                made = (await gateway["whole"].post("/v1/responses", json=ask)).json()
                body = {**ask, "previous_response_id": made["id"]}
                again = await gateway["whole"].post("/v1/responses", json=body)
                assert (again.status_code, again.json()["engine"]) == (200, made["engine"])
                read = await gateway["whole"].get(f"/v1/responses/{made['id']}")
                assert (read.status_code, read.json()["engine"]) == (200, made["engine"])
            unknown = await gateway["whole"].post("/v1/responses", json={**ask, "previous_response_id": "resp_x"})
            assert unknown.status_code == 404 and "resp_x" in unknown.json()["error"]["message"]
