"""The body of `/v1/completions`, checked."""

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvatlas.errors import InvalidValue
from simulator.tokenizer import encode


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """What the mock engine understands; other fields, such as sampling parameters, are accepted and mean nothing."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | list[int]
    max_tokens: int = Field(default=16, ge=1)
    n: int = Field(default=1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_salt: str | None = Field(default=None, min_length=1)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if not prompt or not (
            isinstance(prompt, str) or (isinstance(prompt, list) and set(map(type, prompt)) == {int})
        ):
            raise ValueError("expected one text, or one list of token ids, not empty")
        if isinstance(prompt, str) and any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError("expected text without lone surrogates")
        return prompt

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(encode(self.prompt) if isinstance(self.prompt, str) else self.prompt)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @classmethod
    def parse(cls, body: bytes, *, vocab_size: int) -> "CompletionRequest":
        """Raises InvalidValue with one line that names the field, its value and what was expected."""
        try:
            decoded = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"the body is not JSON: {error}") from error
        if not isinstance(decoded, dict):
            raise InvalidValue(f"the body is a JSON {type(decoded).__name__}; expected an object")
        try:
            request = cls.model_validate(decoded)
        except ValidationError as error:
            raise InvalidValue(_line(error)) from error
        if not isinstance(request.prompt, str):
            wrong = next((token for token in request.prompt if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise InvalidValue(f"prompt has token id {wrong}; expected 0 to {vocab_size - 1}")
        return request


def _line(error: ValidationError) -> str:
    first = error.errors()[0]
    field = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{field} is missing"
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("expected ")
    return f"{field} is {first['input']!r:.100}; expected {expected}"
