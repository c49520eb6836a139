"""The validated request bodies of completions, chats and `/tokenize`. Bodies of other APIs are converted to these."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvatlas.errors import InvalidValue
from kvatlas.validation import describe_expected
from kvatlas_router.tokens import Api, CannotTokenize, TextRequest
from kvatlas_router.tokens.chat_form import as_chat
from kvatlas_simulator.engine.tokenizer import encode
from kvatlas_simulator.http.chat_template import render


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Body(BaseModel, ABC):
    """Common fields of all bodies. Fields that the simulated engine does not know are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None

    @classmethod
    def parse(cls, body: bytes, *, vocab_size: int) -> Self:
        """Parse and validate. Raises InvalidValue, with a one-line message that names the field, its value and what was
        expected."""
        return cls.of(_decode(body), vocab_size=vocab_size)

    @classmethod
    def of(cls, decoded: Mapping[str, Any], *, vocab_size: int) -> Self:
        """Like `parse`, but for a decoded JSON object."""
        try:
            request = cls.model_validate(decoded)
        except ValidationError as error:
            raise InvalidValue(_describe(error)) from error
        wrong = next((token for token in request.token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidValue(f"prompt has token id {wrong}; expected 0 to {vocab_size - 1}")
        return request

    @property
    @abstractmethod
    def token_ids(self) -> tuple[int, ...]:
        """The prompt as the engine sees it."""


class _Text(_Body):
    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if not prompt or not (
            isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) == {int})
        ):
            raise ValueError("expected one text, or one list of token ids, not empty")
        return _check_encodable(prompt) if isinstance(prompt, str) else prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(encode(self.prompt) if isinstance(self.prompt, str) else self.prompt)


class _Chat(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages")
    @classmethod
    def _check_messages(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for message in messages:
            parts = message.get("content") or ""
            listed = parts if isinstance(parts, list) else [{"text": parts}]
            for part in listed:
                text = part.get("text") if isinstance(part, dict) else None
                if not isinstance(text, str) or not isinstance(message.get("role"), str):
                    raise ValueError("expected a role, and content that is text or a list of text parts")
                _check_encodable(text)
        return messages

    @model_validator(mode="after")
    def _check_generation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("expected add_generation_prompt false with continue_final_message")
        return self

    @property
    def token_ids(self) -> tuple[int, ...]:
        text = render(
            self.messages,
            self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            **self._template_arguments,
        )
        return tuple(encode(text))

    @property
    def _template_arguments(self) -> dict[str, Any]:
        """Additional arguments of the template; vLLM's `/tokenize` reads them only from here."""
        given = self.chat_template_kwargs or {}
        return {name: given[name] for name in ("reasoning_effort", "documents", "thinking") if name in given}


class _Generation(_Body):
    max_tokens: int = Field(default=16, ge=1)
    n: int = Field(default=1, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, min_length=1)
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = Field(default=None, ge=0, lt=2**63)

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_usage(self) -> bool:
        """True if each event of a stream carries the usage so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer; no answer contains them."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(_Text, _Generation):
    """The body of `/v1/completions`."""


class ChatRequest(_Chat, _Generation):
    """The body of `/v1/chat/completions`; messages are text, rendered with one fixed template."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def _template_arguments(self) -> dict[str, Any]:
        own = {"reasoning_effort": self.reasoning_effort, "documents": self.documents}
        return super()._template_arguments | {name: value for name, value in own.items() if value is not None}

    def model_post_init(self, _: Any) -> None:
        self.max_tokens = self.max_completion_tokens or self.max_tokens


class TokenizeTextRequest(_Text):
    """The body of `/tokenize` with a prompt."""

    prompt: str


class TokenizeChatRequest(_Chat):
    """The body of `/tokenize` with messages."""


def parse_tokenize(body: bytes, *, vocab_size: int) -> TokenizeTextRequest | TokenizeChatRequest:
    """Parse a body of `/tokenize` of either kind. Raises InvalidValue."""
    kind = TokenizeChatRequest if b'"messages"' in body else TokenizeTextRequest
    return kind.parse(body, vocab_size=vocab_size)


def parse_api(api: Api, body: bytes, *, vocab_size: int) -> CompletionRequest | ChatRequest:
    """The body of any API's call as a completion or a chat. Real engines also turn conversations into chats. Raises
    InvalidValue."""
    if api is Api.CHAT:
        return ChatRequest.parse(body, vocab_size=vocab_size)
    if api is Api.COMPLETIONS:
        return CompletionRequest.parse(body, vocab_size=vocab_size)
    request = TextRequest.of(api, _decode(body))
    fields: dict[str, Any] = {
        "model": request.model,
        "max_tokens": request.output_tokens or 16,
        "n": request.choices,
        **{name: request.body[name] for name in _COMMON_FIELDS if request.body.get(name) is not None},
    }
    if api is Api.TOKENS:
        fields["stream_options"] = request.body.get("stream_options")
    if not api.is_conversation:
        return CompletionRequest.of({**fields, "prompt": request.prompt}, vocab_size=vocab_size)
    try:
        chat = as_chat(request).body
    except CannotTokenize as error:
        raise InvalidValue(str(error)) from error
    return ChatRequest.of({**fields, **chat}, vocab_size=vocab_size)


_COMMON_FIELDS = (
    "stream",
    "cache_salt",
    "kv_transfer_params",
    "kv_hints",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidValue(f"the body is a JSON {type(decoded).__name__}; expected an object")
    return decoded


def _check_encodable(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("expected text without lone surrogates")
    return text


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    if not first["loc"]:
        return describe_expected(first)
    field = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{field} is missing"
    return f"{field} is {first['input']!r:.100}; {describe_expected(first)}"
