"""The calls that ask engines for a request's tokens, and the answers to these calls. Sources: vLLM 0.33 and SGLang 0.5.23.

vLLM renders conversations in all three APIs (`/render` after the call's own path, with `--enable-scale-out`), and all fields
of the request take effect. Its `/tokenize`, which every vLLM has, accepts chats, but not all of their fields. A field that it
does not accept is passed to the template if the effect is the same; otherwise the request gets no tokens. SGLang's
`/tokenize` accepts the same body as its chats; older versions accept only text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind
from kvatlas_router.tokens.chat_form import as_chat, rendered_by_model, template_arguments
from kvatlas_router.tokens.text_request import Api, TextRequest, content_of, media_parts, read_media
from kvatlas_router.tokens.tokenizer import CannotTokenize, PromptTokens, Why

TOKENIZE = "/tokenize"
RENDER_PATHS = frozenset(f"{api}/render" for api in (Api.COMPLETIONS, Api.CHAT, Api.MESSAGES, Api.RESPONSES))

_CHAT_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
"""Fields that vLLM's `/tokenize` reads."""
_ONLY_ITS_ENGINE = "previous_response_id: only the engine has that answer"
_NOT_FOR_SGLANG = ("stream", "stream_options", "add_generation_prompt", "add_special_tokens")
"""Fields that SGLang does not get: it ignores the last two in chats, but not in `/tokenize`."""


@dataclass(frozen=True, slots=True)
class Question:
    """A POST to an engine."""

    path: str
    body: Mapping[str, Any]


def render_question(request: TextRequest) -> Question | None:
    """The call that asks an engine to render the request; None if the request needs no rendering, or if the engine can't do
    it.

    Raises CannotTokenize for a request that continues an answer that only its engine has.
    """
    if request.kind is EngineKind.SGLANG or not (request.api.is_conversation or request.api is Api.COMPLETIONS):
        return None
    if request.api is Api.COMPLETIONS and request.adds_to_prompt is None:
        return None  # `/tokenize` gives the same result
    if request.body.get("previous_response_id"):
        raise CannotTokenize(Why.UNSUPPORTED, _ONLY_ITS_ENGINE)
    kept = {name: value for name, value in request.body.items() if name not in ("stream", "stream_options")}
    if request.api is Api.COMPLETIONS and request.prompts > 1:
        kept["prompt"] = request.prompt
    # ask for no image tensors in the answer: `mm_payload`, in older versions `return_mm_kwargs`
    return Question(f"{request.api}/render", {**kept, "mm_payload": "none", "return_mm_kwargs": False})


def tokenize_question(request: TextRequest) -> Question:
    """The call to `/tokenize`. Raises CannotTokenize if its tokens would differ from those that the engine computes."""
    if request.api.is_conversation:
        return _question(request, _chat_fields(as_chat(request)))
    prompt = request.prompt
    if (added := request.adds_to_prompt) is not None or not isinstance(prompt, str):
        raise CannotTokenize(Why.UNSUPPORTED, f"{added or 'prompt'}: the tokens don't follow from a text")
    special = request.body.get("add_special_tokens", True) if request.api is Api.COMPLETIONS else True
    return _question(request, {"prompt": prompt, "add_special_tokens": special})


def question_before_media(request: TextRequest) -> Question:
    """The call for the messages before the first one with images or other media. Raises CannotTokenize if there are no such
    messages."""
    chat = as_chat(request)
    messages = chat.messages
    before = messages[: next((i for i, one in enumerate(messages) if media_parts(content_of(one))), 0)]
    if not before:
        raise CannotTokenize(Why.UNSUPPORTED, "the first message has images, and no engine renders chats")
    fields = dict(_chat_fields(chat))
    fields.pop("continue_final_message", None)
    return _question(request, {**fields, "messages": before, "add_generation_prompt": False})


def read_tokens(request: TextRequest, url: str, status: int, answer: Any) -> Sequence[int]:
    """The token ids in an answer from `/tokenize`. `answer`: its JSON; None if it is not JSON. Raises
    CannotTokenize."""
    tokens = answer.get("tokens") if status == 200 and isinstance(answer, dict) else None
    if isinstance(tokens, list):
        return tokens
    takes_text_only = request.kind is EngineKind.SGLANG and request.api.is_conversation and status in (400, 422)
    if status in (404, 405) or takes_text_only:
        raise CannotTokenize(Why.UNSUPPORTED, f"{url}: status {status}; use a local tokenizer")
    raise CannotTokenize(Why.FAILED, f"{url}: status {status} without token ids")


def read_rendered(answer: Any) -> PromptTokens | None:
    """The tokens in vLLM's GenerateRequest: `token_ids` and, in `features`, hashes and places by modality. None if the
    answer is not such a request."""
    if isinstance(answer, list) and answer:  # one for each prompt of a completion
        answer = answer[0]
    tokens = answer.get("token_ids") if isinstance(answer, dict) else None
    if not isinstance(tokens, list) or not tokens:
        return None
    try:
        return PromptTokens(tokens, read_media(answer.get("features") or {}))
    except InvalidValue:
        return None


def _question(request: TextRequest, fields: Mapping[str, Any]) -> Question:
    model = request.model
    return Question(TOKENIZE, {"model": model, **fields} if model else fields)


def _chat_fields(chat: TextRequest) -> Mapping[str, Any]:
    body = chat.body
    if chat.kind is EngineKind.SGLANG:
        if body.get("input_ids"):
            raise CannotTokenize(Why.UNSUPPORTED, "input_ids in a chat")
        return {name: value for name, value in body.items() if name not in _NOT_FOR_SGLANG}
    if body.get("previous_response_id"):
        raise CannotTokenize(Why.UNSUPPORTED, _ONLY_ITS_ENGINE)
    if body.get("truncate_prompt_tokens") is not None:
        raise CannotTokenize(Why.UNSUPPORTED, "truncate_prompt_tokens: /tokenize does not know it")
    if body.get("tools") and body.get("tool_choice") == "none":
        raise CannotTokenize(
            Why.UNSUPPORTED, "tool_choice none: whether the tools are rendered depends on the engine's settings"
        )
    if (field := rendered_by_model(chat)) is not None:
        raise CannotTokenize(Why.UNSUPPORTED, f"{field}: /tokenize renders this model without it")
    fields = {name: body[name] for name in _CHAT_FIELDS if body.get(name) is not None}
    if given := template_arguments(body):
        arguments = body.get("chat_template_kwargs")
        fields["chat_template_kwargs"] = {**(arguments if isinstance(arguments, dict) else {}), **given}
    return fields
