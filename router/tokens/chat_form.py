"""Converts conversations in other APIs to chats, as engines do: vLLM 0.33 and SGLang 0.5.23 first turn requests of
Anthropic's Messages and OpenAI's Responses APIs into a chat, each in its own way, and then render that chat.

Anything that depends on the model, the engine's settings or its memory is refused: no tokens are better than wrong ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvatlas_router.tokens.messages_form import chat_of_messages
from kvatlas_router.tokens.responses_form import chat_of_responses
from kvatlas_router.tokens.text_request import Api, TextRequest

_TEMPLATE_FIELDS = ("documents", "reasoning_effort")
_UNSET = (None, "auto")
"""vLLM treats these values as absent (`renderers/params.py`)."""


_RENDERED_BY_MODEL = {
    "reasoning_effort": ("gpt-oss",),
    "response_format": ("kimi-k3", "kimi_k3", "cohere", "command-"),
    "tool_choice": ("kimi-k3", "kimi_k3"),
}
"""Fields that change the prompt only in vLLM's own renderers for these models, not in its `/tokenize` or in a
template."""
_WITHOUT_EFFECT = (None, "auto", {"type": "text"})


def rendered_by_model(chat: TextRequest) -> str | None:
    """A chat's field that only vLLM's renderer knows; None if there is none."""
    named = f"{chat.model_id} {chat.model}".lower()
    for field, models in _RENDERED_BY_MODEL.items():
        if chat.body.get(field) not in _WITHOUT_EFFECT and any(model in named for model in models):
            return field
    return None


def as_chat(request: TextRequest) -> TextRequest:
    """The chat that the engine makes from a conversation. Raises CannotTokenize if a router can't know that chat."""
    forms = {Api.MESSAGES: chat_of_messages, Api.RESPONSES: chat_of_responses}
    form = forms.get(request.api)
    if form is None:
        return request
    chat: Mapping[str, Any] = form(request.body, request.kind)
    named = {"model": request.model} if request.model else {}
    return replace(request, api=Api.CHAT, body={**named, **chat})


def template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that vLLM passes to a chat's template in addition to `chat_template_kwargs`, overriding them."""
    given = {name: value for name in _TEMPLATE_FIELDS if (value := body.get(name)) not in _UNSET}
    arguments = body.get("chat_template_kwargs")
    if "reasoning_effort" in given and "enable_thinking" not in (arguments if isinstance(arguments, dict) else {}):
        given["enable_thinking"] = given["reasoning_effort"] != "none"
    return given
