"""Sends a workload to engines over HTTP, each request to the worker that a policy picks, and notes what came of it."""

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

import anyio
import httpx

from kvatlas.identity import Scope
from router_client import Choice, Prompt, RouterClient
from simulator.workload import Conversation, Session, Turn, Workload


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request goes, and how many tokens should be cached there. `choice` is there where it is booked."""

    worker_id: str
    url: str
    predicted_tokens: int
    choice: Choice | None = None


Policy = Callable[[Turn], AbstractAsyncContextManager[Pick]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request, as a client sees it. Token counts are of the prompt."""

    worker_id: str
    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    refused: int


def round_robin(model: str, engines: dict[str, str], router: RouterClient) -> Policy:
    """Every engine in turn. The prediction is what the index knows of the one whose turn it is."""
    turns = count()
    names = sorted(engines)

    @asynccontextmanager
    async def pick(turn: Turn) -> AsyncIterator[Pick]:
        worker_id = names[next(turns) % len(names)]
        found = (await router.overlap(_prompt(model, turn))).of(worker_id)
        yield Pick(worker_id, engines[worker_id], found.usable_tokens if found is not None else 0)

    return pick


def by_kvatlas(model: str, router: RouterClient) -> Policy:
    """The cheapest worker, reserved until the answer has ended."""

    @asynccontextmanager
    async def pick(turn: Turn) -> AsyncIterator[Pick]:
        async with router.route(_prompt(model, turn)) as choice:
            yield Pick(choice.worker_id, choice.url, choice.predicted_cached_tokens, choice)

    return pick


async def drive(
    workload: Workload, model: str, policy: Policy, speed_up: float, on_outcome: Callable[[Outcome], None]
) -> None:
    """Run every session, each turn after the answer to the last one. Raises httpx' errors and those of the policy."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client, anyio.create_task_group() as sessions:
        for session in workload.sessions:
            sessions.start_soon(_session, client, session, model, policy, speed_up, on_outcome)


async def _session(
    client: httpx.AsyncClient,
    session: Session,
    model: str,
    policy: Policy,
    speed_up: float,
    on_outcome: Callable[[Outcome], None],
) -> None:
    await anyio.sleep(session.arrival_us / 1e6 / speed_up)
    conversation = Conversation(session)
    while (turn := conversation.next_turn()) is not None:
        await anyio.sleep(turn.pause_us / 1e6 / speed_up)
        outcome, answer = await _request(client, turn, model, policy)
        on_outcome(outcome)
        conversation.add_answer(answer)


async def _request(client: httpx.AsyncClient, turn: Turn, model: str, policy: Policy) -> tuple[Outcome, Sequence[int]]:
    refused = 0
    began = perf_counter()
    while True:
        async with policy(turn) as pick:
            answered = await _completion(client, turn, model, pick)
        if not isinstance(answered, float):
            break
        refused += 1
        await anyio.sleep(answered / 20)
    usage, first_s, tokens = answered
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    ttft_ms = ((first_s or perf_counter()) - began) * 1e3
    return Outcome(pick.worker_id, ttft_ms, usage["prompt_tokens"], cached, pick.predicted_tokens, refused), tokens


async def _completion(
    client: httpx.AsyncClient, turn: Turn, model: str, pick: Pick
) -> tuple[dict[str, Any], float | None, list[int]] | float:
    """The engine's usage, when the first token came, and the answer; or after how many seconds to try again."""
    body = {
        "model": turn.adapter or model,
        "prompt": turn.prompt,
        "max_tokens": turn.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    first_s: float | None = None
    answer: list[int] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", f"{pick.url}/v1/completions", json=body) as response:
        if response.status_code == 503:
            return float(response.headers.get("Retry-After", "1"))
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if first_s is None:
                    first_s = perf_counter()
                    if pick.choice is not None:
                        await pick.choice.first_token()
                answer += choice.get("token_ids") or []
    return usage, first_s, answer


def _prompt(model: str, turn: Turn) -> Prompt:
    return Prompt.of_tokens(Scope(model, model, turn.adapter), turn.prompt, output_tokens=turn.max_tokens)
