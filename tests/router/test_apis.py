"""Every API that engines serve is routed by prefix, like a chat."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvatlas.store.connection import Store
from kvatlas_router.tokens import Api
from router_client.pricing.surcharges import session_worker
from tests.router.apis import TURNS, body_of
from tests.router.proxy.engines import running_fleet, running_proxy
from tests.router.proxy.test_proxy import decision, status
from tests.router.tokens.small_model import save_simulators

pytestmark = pytest.mark.anyio

CONVERSATIONS = 4
LATER_TURNS = 3
ENGINES = ("w1", "w2", "w3")


@pytest.mark.parametrize("tokenizer", ["renders", "engine", "local"])
async def test_a_conversation_stays_with_the_engine_of_its_turn_before(
    store: Store, valkey_url: str, tmp_path: Path, tokenizer: str
) -> None:
    chosen = str(save_simulators(tmp_path)) if tokenizer == "local" else "engine"
    engine = {"num_gpu_blocks": 8_192, "enable_scale_out": tokenizer != "engine"}
    apis = [api for api in Api if api is not Api.TOKENS or tokenizer != "engine"]  # its engines also render
    async with (
        running_fleet(store, dict.fromkeys(ENGINES, engine)),
        running_proxy(valkey_url, tokenizer=chosen, tokenizer_deadline_ms=20_000) as client,
    ):
        for api in apis:
            await converse(client, api)
        counted = await status(client)
        assert counted["tokens"]["failed"] == counted["answers"]["prompts_differ"] == 0
        assert counted["answers"]["prompts_equal"] == len(apis) * CONVERSATIONS * (1 + LATER_TURNS)


async def converse(client: httpx.AsyncClient, api: Api) -> None:
    """Send several conversations, interleaved turn by turn."""
    names = [f"conversation {i} by {api}" for i in range(CONVERSATIONS)]
    talks = {name: [*TURNS[:1], ("user", f"{name}: who holds this?")] for name in names}
    homes: dict[str, str] = {}
    for turn in range(1 + LATER_TURNS):
        for name, talk in talks.items():
            answer = await client.post(api, json=body_of(api, talk))
            assert answer.status_code == 200, answer.text
            worker, said = decision(answer)
            assert "untokenized" not in said
            assert worker == homes.setdefault(name, worker), f"turn {turn} of {name}"
            if turn:
                assert int(said["cached"]) > len(name) + len(TURNS[0][1])
            talk += [("assistant", f"It is worker {turn}."), ("user", f"And block {turn}?")]


@pytest.mark.parametrize("api", Api)
async def test_a_stream_passes_unchanged_and_its_usage_is_read(store: Store, valkey_url: str, api: Api) -> None:
    engine = {"num_gpu_blocks": 4_096, "enable_scale_out": True}
    async with running_fleet(store, {"w1": engine}) as fleet, running_proxy(valkey_url) as client:
        body = {**body_of(api), "stream": True}
        passed = (await client.post(api, json=body)).text
        direct = (await fleet.clients["w1"].post(api, json=body)).text
        assert _events(passed) == _events(direct) and len(_events(passed)) > 2
        if api not in (Api.GENERATE, Api.TOKENS):
            assert (await status(client))["answers"]["prompts_equal"] == 1


async def test_what_can_not_be_read_is_for_the_engine_to_judge(store: Store, valkey_url: str) -> None:
    bodies: list[dict[str, Any]] = [{}, {"messages": 5, "input": {}, "text": {}, "token_ids": "x"}]
    async with running_fleet(store, {"w1": {"enable_scale_out": True}}), running_proxy(valkey_url) as client:
        for api, body in product([api for api in Api if not api.is_checked], bodies):
            answer = await client.post(api, json=body)
            assert answer.status_code == 400 and decision(answer)[1]["untokenized"] == "unread", f"{api}: {body}"


async def test_agents_session_headers_are_hints(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {id: {} for id in ENGINES}), running_proxy(valkey_url, session_ms=10_000) as client:
        for header in ("X-Claude-Code-Session-Id", "session-id", "session_id", "X-Session-Affinity"):
            for session in (f"{header} {name}" for name in ("a", "b", "c", "d")):
                asked = body_of(Api.MESSAGES, [TURNS[0], ("user", session)])
                answer = await client.post(Api.MESSAGES, json=asked, headers={header: session})
                assert decision(answer)[0] == session_worker(session, list(ENGINES)), session


@pytest.mark.parametrize(
    ("settings", "suffix"),
    [({"session_headers": ""}, ""), ({}, "x" * 256), ({}, "\tx")],
    ids=["off", "long", "control"],
)
async def test_session_headers_that_are_off_or_no_names_do_not_count(
    store: Store, valkey_url: str, settings: dict[str, Any], suffix: str
) -> None:
    sessions = [f"{i}{suffix}" for i in range(12)]
    async with (
        running_fleet(store, {id: {} for id in ENGINES}),
        running_proxy(valkey_url, session_ms=10_000, **settings) as client,
    ):
        chosen = []
        for session in sessions:
            asked = body_of(Api.MESSAGES, [TURNS[0], ("user", session[:2])])
            headers = {"x-claude-code-session-id": session}
            chosen.append(decision(await client.post(Api.MESSAGES, json=asked, headers=headers))[0])
        assert chosen != [session_worker(session, list(ENGINES)) for session in sessions]
        assert (await status(client))["outliers"]["bad"] == 0


def _events(text: str) -> list[str]:
    """The events without what differs in every answer."""
    names = (
        "id",
        "item_id",
        "request_id",
        "created",
        "created_at",
        "cached_tokens",
        "cache_read_input_tokens",
        "input_tokens",
    )
    return [_masked(event, names) for event in text.split("\n\n") if event]


def _masked(event: str, names: tuple[str, ...]) -> str:
    *head, data = event.split("\n")
    if not data.startswith("data: {"):
        return event

    def mask(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: "" if name in names else mask(one) for name, one in value.items()}
        return [mask(one) for one in value] if isinstance(value, list) else value

    return "\n".join([*head, json.dumps(mask(json.loads(data[6:])))])
