"""Sends a workload through a router over HTTP, as clients do, and records the outcome of each request."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import anyio
import httpx

from kvatlas.errors import Unreachable
from kvatlas.predictions.accuracy import Deviation, Prediction, deviation
from kvatlas_router.proxy.headers import DECISION_HEADER
from kvatlas_simulator.workload import Conversation, Session, Turn, Workload
from router_client.learning.prediction_accuracy import BY_INDEX

KEEPALIVE_S = 2.0
"""Below the router's 5 s, because a request on a connection that the router is just closing would fail."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished request, as its client sees it. Times are from its first attempt to the first and to the last token. Token
    counts are for the prompt; `refused`: attempts that engines refused."""

    worker_id: str
    ttft_ms: float
    answer_ms: float
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    deviation: Deviation
    refused: int


@dataclass(frozen=True, slots=True)
class _Decision:
    """The router's decision, from the header of its response."""

    worker_id: str
    predicted: Prediction
    attempt: int

    @classmethod
    def parse(cls, header: str) -> "_Decision":
        name, *parts = header.split(";")
        fields = dict(part.split("=", 1) for part in parts)
        predicted = Prediction(
            int(fields["prompt"]) if "prompt" in fields else None,
            int(fields["cached"]),
            int(fields.get("unconfirmed", 0)),
            fields["by"] in BY_INDEX,
        )
        return cls(name.strip('"'), predicted, int(fields["attempt"]))


@dataclass(frozen=True, slots=True)
class _Answer:
    """`first_token_s`, `last_token_s`: when these tokens arrived, on the clock of `perf_counter`."""

    decision: _Decision
    usage: dict[str, Any]
    first_token_s: float
    last_token_s: float
    tokens: Sequence[int]


async def send_workload(
    workload: Workload, model: str, router_url: str, speed_up: float, on_outcome: Callable[[Outcome], None]
) -> None:
    """Run every session, sending each turn after the answer to the last one. Raises Unreachable if a request fails."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
    failed: BaseException | None = None
    try:
        async with (
            httpx.AsyncClient(base_url=router_url, timeout=60, limits=limits) as client,
            anyio.create_task_group() as sessions,
        ):
            for session in workload.sessions:
                sessions.start_soon(_run_session, client, session, model, speed_up, on_outcome)
    except* httpx.HTTPError as errors:
        failed = errors.exceptions[0]
    if failed is not None:  # raised here, because Python 3.11.2 wraps exceptions from an `except*` block in a group
        raise Unreachable(f"router at {router_url}: {str(failed) or type(failed).__name__}") from failed


async def _run_session(
    client: httpx.AsyncClient, session: Session, model: str, speed_up: float, on_outcome: Callable[[Outcome], None]
) -> None:
    await anyio.sleep(session.arrival_us / 1e6 / speed_up)
    conversation = Conversation(session)
    while (turn := conversation.next_turn()) is not None:
        await anyio.sleep(turn.pause_us / 1e6 / speed_up)
        outcome, answer = await _request(client, turn, model)
        on_outcome(outcome)
        conversation.add_answer(answer)


async def _request(client: httpx.AsyncClient, turn: Turn, model: str) -> tuple[Outcome, Sequence[int]]:
    """Send one turn, and send it again after every refusal. Returns the outcome and the answer's tokens."""
    refused = 0
    began = perf_counter()
    while not isinstance(answer := await _post_completion(client, turn, model), _Answer):
        refused += 1
        await anyio.sleep(answer / 20)
    usage, decision = answer.usage, answer.decision
    prompt, cached = usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome = Outcome(
        decision.worker_id,
        (answer.first_token_s - began) * 1e3,
        (answer.last_token_s - began) * 1e3,
        prompt,
        cached,
        decision.predicted.cached_tokens,
        deviation(decision.predicted, prompt, cached),
        refused + decision.attempt - 1,
    )
    return outcome, answer.tokens


async def _post_completion(client: httpx.AsyncClient, turn: Turn, model: str) -> _Answer | float:
    """The answer or, if every engine is full, the number of seconds until the next attempt."""
    body = {
        "model": turn.adapter or model,
        "prompt": turn.prompt,
        "max_tokens": turn.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    first_token_s = last_token_s = 0.0
    tokens: list[int] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code == 503:
            return float(response.headers.get("Retry-After", "1"))
        response.raise_for_status()
        decision = _Decision.parse(response.headers[DECISION_HEADER])
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                last_token_s = perf_counter()
                first_token_s = first_token_s or last_token_s
                tokens += choice.get("token_ids") or []
    ended_s = perf_counter()
    return _Answer(decision, usage, first_token_s or ended_s, last_token_s or ended_s, tokens)
