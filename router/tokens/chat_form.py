"""Conversations of other APIs as the chats that engines make of them: vLLM 0.33 and SGLang 0.5.23 turn Anthropic's messages and
OpenAI's responses into a chat first, each in its own way, and render that.

What depends on the model, on settings of the engine or on what the engine remembers is refused: no tokens are better than
wrong ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvatlas_router.tokens.messages_form import chat_of_messages
from kvatlas_router.tokens.responses_form import chat_of_responses
from kvatlas_router.tokens.text_request import Api, TextRequest

_TEMPLATE_FIELDS = ("documents", "reasoning_effort")
_UNSET = (None, "auto")
"""vLLM takes these for a field that is not there (`renderers/params.py`)."""


_RENDERED_BY_MODEL = {
    "reasoning_effort": ("gpt-oss",),
    "response_format": ("kimi-k3", "kimi_k3", "cohere", "command-"),
    "tool_choice": ("kimi-k3", "kimi_k3"),
}
"""Fields by which vLLM's own renderers of these models make another prompt, and neither its `/tokenize` nor a template does."""
_WITHOUT_EFFECT = (None, "auto", {"type": "text"})


def rendered_by_model(chat: TextRequest) -> str | None:
    """The field of a chat for vLLM that only its renderer knows; None without one."""
    named = f"{chat.model_id} {chat.model}".lower()
    for field, models in _RENDERED_BY_MODEL.items():
        if chat.body.get(field) not in _WITHOUT_EFFECT and any(model in named for model in models):
            return field
    return None


def as_chat(request: TextRequest) -> TextRequest:
    """The chat that its engine makes of a conversation. Raises CannotTokenize if a router can't know that chat."""
    forms = {Api.MESSAGES: chat_of_messages, Api.RESPONSES: chat_of_responses}
    form = forms.get(request.api)
    if form is None:
        return request
    chat: Mapping[str, Any] = form(request.body, request.kind)
    named = {"model": request.model} if request.model else {}
    return replace(request, api=Api.CHAT, body={**named, **chat})


def template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM gives to the template of a chat besides `chat_template_kwargs`, and rather than those."""
    given = {name: value for name in _TEMPLATE_FIELDS if (value := body.get(name)) not in _UNSET}
    arguments = body.get("chat_template_kwargs")
    if "reasoning_effort" in given and "enable_thinking" not in (arguments if isinstance(arguments, dict) else {}):
        given["enable_thinking"] = given["reasoning_effort"] != "none"
    return given
