"""A client that takes more than its limits allow, or more than its share."""

from collections.abc import Awaitable
from pathlib import Path

import anyio
import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from tests.attacks.guarded_router import (
    ACME,
    COMPLETIONS,
    OPERATOR,
    OTHER,
    WATCHER,
    bearer,
    clients_text,
    completion,
    guarded_router,
    tenants_fleet,
)
from tests.eventually import until
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL, running_fleet
from tests.router.proxy.faulty_engine import faulty_engine, status, well

pytestmark = pytest.mark.anyio


async def test_a_client_may_use_what_its_limits_say(store: Store, valkey_url: str, tmp_path: Path) -> None:
    other = "requests_per_minute = 4\ntokens_per_minute = 1000\nbody_bytes = 10000\nmodels = ['mock-*']".replace(
        "\n", "\n        "
    )
    async with (
        tenants_fleet(store),
        guarded_router(valkey_url, tmp_path, clients_text(other=other)) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):

        def ask(**more: object) -> Awaitable[httpx.Response]:
            return client.post(COMPLETIONS, json=completion(**more), headers=bearer(OTHER))

        first = await ask()
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "4"
        assert first.headers["x-ratelimit-remaining-requests"] == "3"
        assert first.headers["x-ratelimit-limit-tokens"] == "1000"
        assert 790 <= int(first.headers["x-ratelimit-remaining-tokens"]) <= 900
        long = await ask(prompt=[1] * 900)
        assert long.status_code == 429 and int(long.headers["retry-after"]) >= 1
        assert long.json()["error"]["type"] == "rate_limit_error"
        body = await ask(user="x" * 20_000)
        assert body.status_code == 413
        missing = await ask(model="secret-model")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        over = await ask()
        assert over.status_code == 429 and "requests a minute" in over.json()["error"]["message"]
        assert over.headers["x-ratelimit-remaining-requests"] == "0"
        acmes = await client.post(COMPLETIONS, json=completion(), headers=bearer(WATCHER))
        assert acmes.status_code == 200, "another client's limits are its own"


async def test_no_spelling_of_a_request_hides_tokens_from_a_limit(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    hidden: dict[str, dict[str, object]] = {
        "a long answer": {"max_tokens": 2_000},
        "a limit that its call does not have": {"max_tokens": 2_000, "max_completion_tokens": 1, "max_new_tokens": 1},
        "a number as a text": {"max_tokens": "2000"},
        "a number with a fraction": {"n": 2_000.0},
        "answers as a text": {"n": "2000"},
        "other prompts than the first": {"prompt": [[1], [2] * 2_000]},
        "other texts than the first": {"prompt": ["a", "b" * 8_000]},
    }
    async with (
        tenants_fleet(store),
        guarded_router(valkey_url, tmp_path, clients_text(other="tokens_in_flight = 1000")) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for act, more in hidden.items():
            answer = await client.post(COMPLETIONS, json=completion(**more), headers=bearer(OTHER))
            assert answer.status_code == 429 and "tokens" in answer.json()["error"]["message"], act
        assert (await client.post(COMPLETIONS, json=completion(), headers=bearer(OTHER))).status_code == 200


async def test_no_spelling_of_a_stream_hides_its_usage(store: Store, valkey_url: str, tmp_path: Path) -> None:
    """Engines read all of these as a request for a stream without usage."""
    async with (
        faulty_engine(well) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for stream in (True, 1, 1.0, "true", "Yes"):
            for options in (None, {}, {"include_usage": False}, {"include_usage": "false"}):
                asked = completion(stream=stream, stream_options=options)
                answer = await client.post(COMPLETIONS, json=asked, headers=bearer(OTHER))
                assert answer.status_code == 200
                received = await engine.requests[-1].json()
                assert received["stream_options"] == {"include_usage": True}, (stream, options)


async def test_requests_that_fail_everywhere_use_up_no_retries_of_other_tenants(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    bomb, good = list(range(5_000, 5_064)), list(range(6_000, 6_064))

    async def fail(request: Request) -> Response:
        asked = (await request.json())["prompt"]
        return await (status(500) if asked == bomb or request.headers["host"] in failing else well)(request)

    failing: list[str] = []
    async with (
        faulty_engine(fail) as first,
        faulty_engine(fail) as second,
        running_fleet(store, {}, {"w1": {"url": first.url}, "w2": {"url": second.url}}) as fleet,
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        await fleet.holds("w1", good, Scope(MODEL, MODEL, None, "acme"))
        asked = {"model": MODEL, "prompt": bomb, "max_tokens": 1}
        for _ in range(60):
            assert (await client.post(COMPLETIONS, json=asked, headers=bearer(OTHER))).status_code == 500
        failing.append(first.url.removeprefix("http://"))
        for _ in range(3):
            answer = await client.post(COMPLETIONS, json={**asked, "prompt": good}, headers=bearer(ACME))
            assert answer.status_code == 200
        tried = [(await one.json())["prompt"] for one in first.requests]
        assert good in tried, "a retry was needed"


async def test_a_client_that_leaves_before_the_end_pays_for_what_it_was_sent(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    """No engine reports its usage then, and fewer tokens were expected."""
    async with (
        running_fleet(store, {"w1": {"decode_step_us": 500, "num_gpu_blocks": 4_096}}),
        guarded_router(valkey_url, tmp_path, clients_text(other="tokens_per_minute = 600")) as router,
        http_client(base_url=router.url, timeout=60, headers=bearer(OTHER)) as client,
    ):
        asked = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 420, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=asked) as answer:
            lines = answer.aiter_lines()
            received = 0
            while received < 400:
                received += (await anext(lines)).startswith("data: ")

        async def has_paid() -> bool:
            return int((await client.get("/v1/models")).headers["x-ratelimit-remaining-tokens"]) < 400

        await until(has_paid, what="the answer's tokens are counted")


async def test_requests_in_flight_are_bounded_and_come_back(store: Store, valkey_url: str, tmp_path: Path) -> None:
    clients = clients_text(other="requests_in_flight = 2")
    async with (
        running_fleet(store, {"slow": {"decode_step_us": 50_000}}),
        guarded_router(valkey_url, tmp_path, clients) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        answers: list[int] = []

        async def ask() -> None:
            body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 20}
            answers.append((await client.post(COMPLETIONS, json=body, headers=bearer(OTHER))).status_code)

        for _ in range(2):
            answers.clear()
            async with anyio.create_task_group() as tasks:
                for _ in range(6):
                    tasks.start_soon(ask)
            assert answers.count(200) >= 2 and answers.count(200) + answers.count(429) == 6


async def test_a_key_that_floods_the_queue_delays_others_by_a_turn_each(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    one_slot = {"running_decodes": 0, "forward_pass": {"active_request_slots": 0, "total_request_slots": 1}}
    async with (
        running_fleet(store, {"w1": {"decode_step_us": 20_000}}, {"w1": one_slot}),
        guarded_router(valkey_url, tmp_path, None, "--queue-requests", "100", "--queue-wait-s", "600") as router,
        http_client(base_url=router.url, timeout=600) as client,
        anyio.create_task_group() as tasks,
    ):
        ended: list[str] = []

        async def ask(key: str) -> None:
            body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 10}
            assert (await client.post(COMPLETIONS, json=body, headers=bearer(key))).status_code == 200
            ended.append(key)

        async def waiting() -> int:
            status = await client.get(f"{router.control}/status", headers=bearer(OPERATOR))
            return int(status.json()["waiting"])

        async def flood_waits() -> bool:
            return await waiting() >= 40

        for _ in range(60):
            tasks.start_soon(ask, OTHER)
        await until(flood_waits, what="the flood waits", deadline_s=60)
        before = len(ended)
        for _ in range(5):
            tasks.start_soon(ask, ACME)
        await until(lambda: ended.count(ACME) == 5, what="the others are served", deadline_s=60)
        last = [place for place, key in enumerate(ended) if key == ACME][-1]
        assert last - before <= 20
        tasks.cancel_scope.cancel()
