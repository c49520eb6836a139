"""The request for the rest of an answer: its prompt, and what its client already has.

Request formats are those of vLLM 0.33 and SGLang 0.5.23. Token ids are exact: a prompt of ids is continued with ids, and a chat
is continued as a completion if its engine gives the ids of prompt and answer. Otherwise a chat's last message is the partial
answer (`continue_final_message`), and any other prompt is a longer text. No API takes both a text and token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens.chat_form import as_chat
from kvatlas_router.tokens.text_request import Api, TextRequest

DEFAULT_COMPLETION_TOKENS = 16
"""Limit on the answer's tokens in vLLM's and SGLang's completions without `max_tokens`."""
DEFAULT_GENERATE_TOKENS = 128
"""Limit on the answer's tokens in SGLang's `/generate` without `max_new_tokens`."""
MOST_PROMPT_IDS = 1 << 15
"""Engines also return the prompt's ids, in a single event. Longer chats are continued as text; answers to longer prompts of
ids are repeated from their beginning."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens")
_LEAST = ("min_tokens", "min_new_tokens")
_DEFAULTS = {
    Api.COMPLETIONS: ("max_tokens", DEFAULT_COMPLETION_TOKENS),
    Api.GENERATE: ("max_new_tokens", DEFAULT_GENERATE_TOKENS),
}
_OF_CHATS = (
    "messages",
    "max_completion_tokens",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "include_reasoning",
    "modalities",
)
"""Fields that determine a chat's prompt and format; a completion needs none of them."""
_SAME = (
    *("model", "stream", "cache_salt", "max_tokens", "min_tokens", "ignore_eos", "seed", "stop", "logit_bias"),
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_RENAMED = {"max_output_tokens": "max_tokens", "stop_sequences": "stop"}
"""Fields that messages and responses share with chats, some of them under different names."""


def most_tokens(text: TextRequest) -> int | None:
    """The limit on the answer's tokens; None: the engine's own limit."""
    found = [value for name in _LIMITS if type(value := text.sampling.get(name)) is int]
    default = _DEFAULTS.get(text.api)
    if default is not None and not found and default[0] not in text.sampling:
        return default[1]
    return min(found, default=None)


def counting_fields(text: TextRequest, kind: EngineKind, prompt_tokens: int) -> Mapping[str, Any]:
    """Fields that make this kind of engine count a stream's tokens in each event, and give their ids if the answer can be
    continued with ids. `prompt_tokens`: the prompt's length, or a guess."""
    options = text.body.get("stream_options")
    if text.api not in (Api.CHAT, Api.COMPLETIONS, Api.TOKENS):
        return {}  # these APIs have no such option, or always count
    if options is not None and not isinstance(options, dict):
        return {}  # the engine refuses it
    options = {**(options or {}), "include_usage": True}
    if text.api is Api.TOKENS:
        return {"stream_options": options}
    fields: dict[str, Any] = {"stream_options": {**options, "continuous_usage_stats": True}}
    asks = has_ids(text) or _may_give_ids(text, kind)
    return {**fields, "return_token_ids": True} if asks and prompt_tokens <= MOST_PROMPT_IDS else fields


def _may_give_ids(text: TextRequest, kind: EngineKind) -> bool:
    """True for a chat that can be continued as a completion from token ids: engines read only text and tool calls from its
    answer's tokens, and its prompt consists of tokens alone. SGLang refuses to stream chats with token ids."""
    if text.api is not Api.CHAT or kind is not EngineKind.VLLM or text.media_items:
        return False
    return not (text.body.get("logprobs") or stops_of(text) or (text.body.get("tools") and text.choices > 1))


def may_parse(text: TextRequest) -> bool:
    """True for a chat whose tool calls an engine's parser can read from its tokens."""
    return bool(text.body.get("tools")) and _may_give_ids(text, EngineKind.VLLM)


def has_ids(text: TextRequest) -> bool:
    """True if the prompt is given as token ids."""
    return not text.api.is_conversation and not isinstance(text.prompt, str)


def stops_of(text: TextRequest) -> tuple[str, ...]:
    """The request's stop strings."""
    stop = text.sampling.get("stop_sequences" if text.api is Api.MESSAGES else "stop")
    listed = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    return tuple(one for one in listed if isinstance(one, str) and one)


def begun_stop(sent: str, stops: Sequence[str]) -> int:
    """Number of characters at the end that may begin a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    return next(
        (n for n in range(min(longest, len(sent)), 0, -1) if any(stop.startswith(sent[-n:]) for stop in stops)), 0
    )


def body_of_ids(text: TextRequest, prompt_ids: Sequence[int], ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """The body of a completion that asks for the rest of a conversation. `ids`: the answer so far;
    `tokens`: the number of its tokens, as its engines counted them."""
    text = _as_chat(text)
    body = {name: value for name, value in text.body.items() if name not in _OF_CHATS}
    most = most_tokens(text)
    limits = {"max_tokens": None if most is None else max(1, most - tokens)}
    return {**body, **_shorter(text, tokens), **limits, "prompt": [*prompt_ids, *ids]}


def body_of_rest(text: TextRequest, sent: str, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """The body that asks for the rest. `sent`, `ids`, `tokens`: the answer so far. Raises CannotTokenize for a conversation of
    another API whose chat is not known."""
    text = _as_chat(text)
    shorter = _shorter(text, tokens)
    nested = text.api in (Api.GENERATE, Api.TOKENS)
    body = {**text.body, **({"sampling_params": {**text.sampling, **shorter}} if nested else shorter)}
    if not sent and not ids:
        return body
    if not text.api.is_conversation:
        name, given = text.named_prompt
        prompt = text.prompt
        longer = prompt + sent if isinstance(prompt, str) else [*prompt, *ids]
        return {**body, name: longer if given is prompt else [longer]}
    messages = list(text.messages)
    if body.get("continue_final_message") is True:
        last = messages.pop()
        messages.append({**last, "content": last["content"] + sent})
    else:
        messages.append({"role": "assistant", "content": sent})
    return {**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def _as_chat(text: TextRequest) -> TextRequest:
    """The chat of a request, which streams its usage."""
    if text.api not in (Api.MESSAGES, Api.RESPONSES):
        return text
    named = {name: name for name in _SAME} | _RENAMED
    same = {chat: text.body[name] for name, chat in named.items() if text.body.get(name) is not None}
    options = {"include_usage": True, "continuous_usage_stats": True}
    return replace(text, api=Api.CHAT, body={**as_chat(text).body, **same, "stream_options": options})


def _shorter(text: TextRequest, tokens: int) -> dict[str, Any]:
    """The limits on the answer's length, reduced by this number of tokens."""
    sampling = text.sampling
    fields: dict[str, Any] = {
        name: max(1, value - tokens) for name in _LIMITS if type(value := sampling.get(name)) is int
    }
    default = _DEFAULTS.get(text.api)
    if default is not None and default[0] not in sampling:
        fields[default[0]] = max(1, default[1] - tokens)
    least = {name: max(0, value - tokens) for name in _LEAST if type(value := sampling.get(name)) is int}
    return fields | least
