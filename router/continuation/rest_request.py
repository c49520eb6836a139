"""The request for the rest of an answer: its prompt, and what its client already has.

Forms of vLLM 0.33 and SGLang 0.5.23: a chat's last message is the partial answer (`continue_final_message`); a completion's
prompt is longer. Neither API takes both a text and token ids, so a prompt of token ids goes on with token ids.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas_router.continuation.messages import chat_body
from kvatlas_router.tokens.text_request import Api, TextRequest

DEFAULT_COMPLETION_TOKENS = 16
"""Of vLLM's and SGLang's completions without `max_tokens`."""
MOST_PROMPT_IDS = 1 << 15
"""Engines return the prompt's ids too, in one event. Answers to longer prompts are repeated from their beginning."""
_LIMITS = ("max_tokens", "max_completion_tokens")


def most_tokens(text: TextRequest) -> int | None:
    """The limit of the answer's tokens; None: the engine's own."""
    found = [value for name in _LIMITS if type(value := text.body.get(name)) is int]
    if text.api is Api.COMPLETIONS and not found and "max_tokens" not in text.body:
        return DEFAULT_COMPLETION_TOKENS
    return min(found, default=None)


def counting_fields(text: TextRequest) -> Mapping[str, Any]:
    """Fields with which a stream counts its tokens in each event, and gives their ids if the prompt has ids."""
    options = text.body.get("stream_options")
    if text.api is Api.MESSAGES:
        return {}  # not there
    if options is not None and not isinstance(options, dict):
        return {}  # the engine refuses it
    fields: dict[str, Any] = {
        "stream_options": {**(options or {}), "include_usage": True, "continuous_usage_stats": True}
    }
    few = has_ids(text) and len(text.prompt) <= MOST_PROMPT_IDS
    return {**fields, "return_token_ids": True} if few else fields


def has_ids(text: TextRequest) -> bool:
    """True if the prompt is given as token ids."""
    return text.api is Api.COMPLETIONS and not isinstance(text.prompt, str)


def stops_of(text: TextRequest) -> tuple[str, ...]:
    """The request's stop strings."""
    stop = text.body.get("stop_sequences" if text.api is Api.MESSAGES else "stop")
    listed = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return tuple(one for one in listed if isinstance(one, str) and one)


def begun_stop(sent: str, stops: Sequence[str]) -> int:
    """Letters at the end that may begin a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    return next(
        (n for n in range(min(longest, len(sent)), 0, -1) if any(stop.startswith(sent[-n:]) for stop in stops)), 0
    )


def body_of_rest(text: TextRequest, sent: str, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """The body that asks for the rest. `sent`, `ids`, `tokens`: the answer so far. Raises CannotTokenize for a conversation of
    another API whose chat is not known."""
    if text.api is Api.MESSAGES:
        text = TextRequest(Api.CHAT, chat_body(text), text.kind, text.model_id, text.tenant_id)
    body = {**text.body, **_shorter(text, tokens)}
    if not sent and not ids:
        return body
    if text.api is Api.COMPLETIONS:
        prompt = text.prompt
        return {**body, "prompt": prompt + sent if isinstance(prompt, str) else [*prompt, *ids]}
    messages = list(text.messages)
    if body.get("continue_final_message") is True:
        last = messages.pop()
        messages.append({**last, "content": last["content"] + sent})
    else:
        messages.append({"role": "assistant", "content": sent})
    return {**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _shorter(text: TextRequest, tokens: int) -> dict[str, Any]:
    """The limits of the answer's length, without these tokens."""
    body = text.body
    fields: dict[str, Any] = {name: max(1, value - tokens) for name in _LIMITS if type(value := body.get(name)) is int}
    if text.api is Api.COMPLETIONS and "max_tokens" not in body:
        fields["max_tokens"] = max(1, DEFAULT_COMPLETION_TOKENS - tokens)
    if type(least := body.get("min_tokens")) is int:
        fields["min_tokens"] = max(0, least - tokens)
    return fields
