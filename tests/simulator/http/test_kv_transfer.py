"""Two simulated engines share a request, in vLLM's format and in SGLang's."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from kvatlas_router.disaggregation.kv_transfer_params import ASK
from tests.simulator.running_engine import running_engine, scrape_metrics

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 330))
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5}


@pytest.fixture
async def engines(request: pytest.FixtureRequest) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Clients of engines with the modes that the test names."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(running_engine(disaggregation=mode)) for mode in request.param]
        yield [client for _, client in started]


def modes(*named: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("engines", [named], indirect=True)


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={**BODY, **fields})


def room_at(client: httpx.AsyncClient, room: int) -> dict[str, Any]:
    parts = urlsplit(str(client.base_url))
    return {"bootstrap_host": parts.hostname, "bootstrap_port": parts.port, "bootstrap_room": room}


async def kv_usage(client: httpx.AsyncClient) -> float:
    return (await scrape_metrics(client))["vllm:kv_cache_usage_perc"][0]


async def computed_tokens(client: httpx.AsyncClient) -> float:
    found = await scrape_metrics(client)
    return found["vllm:prompt_tokens_total"][0] - found["vllm:prefix_cache_hits_total"][0]


@modes("vllm", "vllm")
async def test_a_prompt_computed_elsewhere_gives_the_same_answer(engines: list[httpx.AsyncClient]) -> None:
    prefill, decode = engines
    whole = (await complete(decode, cache_salt="x")).json()
    first = (await complete(prefill, max_tokens=1, kv_transfer_params=ASK)).json()
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"] and len(params["remote_block_ids"]) == 8
    assert await kv_usage(prefill) > 0  # held for the partner
    answer = (await complete(decode, cache_salt="y", kv_transfer_params=params)).json()
    assert answer["choices"][0]["text"] == whole["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
    assert await kv_usage(prefill) == 0
    again = await complete(decode, cache_salt="z", kv_transfer_params=params)  # it can be read once
    assert again.status_code == 500 and "KV transfer" in again.json()["error"]["message"]


@modes("vllm")
async def test_an_engine_whose_blocks_are_all_held_goes_on(engines: list[httpx.AsyncClient]) -> None:
    (prefill,) = engines
    for number in range(12):  # 8 blocks each, in a cache of 64
        answer = await complete(prefill, prompt=[number, *PROMPT], max_tokens=1, kv_transfer_params=ASK)
        assert answer.status_code == 200 and answer.json()["kv_transfer_params"]


@modes("none")
async def test_an_engine_without_a_connector_ignores_the_fields(engines: list[httpx.AsyncClient]) -> None:
    answer = await complete(engines[0], kv_transfer_params=ASK, **room_at(engines[0], 1))
    assert answer.status_code == 200 and "kv_transfer_params" not in answer.json()


@modes("sglang-prefill", "sglang-decode")
async def test_two_engines_meet_in_a_room_whoever_comes_first(engines: list[httpx.AsyncClient]) -> None:
    prefill, decode = engines
    answers: dict[str, httpx.Response] = {}
    for room, order in enumerate((("prefill", "decode"), ("decode", "prefill"))):
        clients = {"prefill": prefill, "decode": decode}

        async def ask(name: str, fields: dict[str, Any], clients: dict[str, httpx.AsyncClient] = clients) -> None:
            answers[name] = await complete(clients[name], prompt=[fields["bootstrap_room"], *PROMPT], **fields)

        async with anyio.create_task_group() as tasks:
            for name in order:
                tasks.start_soon(ask, name, room_at(prefill, room))
        assert [answers[name].status_code for name in ("prefill", "decode")] == [200, 200]
        assert answers["prefill"].json()["usage"]["completion_tokens"] == 1
        assert answers["decode"].json()["usage"]["completion_tokens"] == 5
        assert await kv_usage(prefill) == 0


@modes("sglang-prefill", "sglang-decode")
async def test_an_engine_of_one_part_refuses_a_request_without_a_room(engines: list[httpx.AsyncClient]) -> None:
    for client in engines:
        answer = await complete(client)
        assert answer.status_code == 400 and "without bootstrap room id" in answer.json()["error"]["message"]


@modes("sglang-decode")
async def test_a_partner_that_is_away_is_an_error_of_the_server(engines: list[httpx.AsyncClient]) -> None:
    away = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 7}
    answer = await complete(engines[0], **away)
    assert answer.status_code == 500 and "KV transfer from 127.0.0.1:1 failed" in answer.json()["error"]["message"]
