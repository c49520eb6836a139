"""One conversation in the form of each API that engines serve."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas_router.tokens import Api
from kvatlas_simulator.http.chat_template import render

Turns = Sequence[tuple[str, str]]
"""Roles and texts; the first one is the system's."""

TURNS: Turns = (("system", "Be brief, and say who holds it."), ("user", "Zürich: who holds this prefix?"))


def body_of(api: Api, turns: Turns = TURNS, *, model: str = "mock-model", output_tokens: int = 2) -> dict[str, Any]:
    """The call's body."""
    messages = [{"role": role, "content": text} for role, text in turns]
    text = render(messages)
    limit = {"max_tokens": output_tokens}
    bodies: Mapping[Api, dict[str, Any]] = {
        Api.COMPLETIONS: {"prompt": text, **limit},
        Api.CHAT: {"messages": messages, **limit},
        Api.MESSAGES: {"system": messages[0]["content"], "messages": messages[1:], **limit},
        Api.RESPONSES: {
            "instructions": messages[0]["content"],
            "input": messages[1:],
            "max_output_tokens": output_tokens,
        },
        Api.GENERATE: {"text": text, "sampling_params": {"max_new_tokens": output_tokens}},
        Api.TOKENS: {"token_ids": list(text.encode()), "sampling_params": limit},
    }
    return {"model": model, **bodies[api]}
