"""The body of a completion or a chat, as far as a router reads it. The engine checks the rest."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from kvatlas.blocks.reuse import CacheReading
from kvatlas.errors import InvalidValue
from kvatlas.validation import MAX_OUTPUT_TOKENS
from router_client.prompt import OutputLimits

MAX_PARSED_BYTES = 8 << 20
"""A million token ids with their commas; decoded in some 30 ms."""
MAX_PARSED_CONTAINERS = 1 << 17


class Api(StrEnum):
    """OpenAI's calls; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request. `body` is its JSON, unchecked; the properties are what a router reads from it. `tenant_id`: only engines
    that may see this tenant's prompts tokenize it; None: not known yet."""

    api: Api
    body: Mapping[str, Any]
    tenant_id: str | None = None

    @classmethod
    def parse(cls, api: Api, body: bytes) -> Self:
        """Raises InvalidValue, one line, for a body that is not a JSON object or has no prompt or messages."""
        return cls.of(api, parse_object(body))

    @classmethod
    def of(cls, api: Api, decoded: Mapping[str, Any]) -> Self:
        """As `parse`, of a body that is decoded."""
        name = "messages" if api is Api.CHAT else "prompt"
        if not decoded.get(name) or not isinstance(decoded[name], list if api is Api.CHAT else (str, list)):
            raise InvalidValue(f"{name} is {decoded.get(name)!r:.80}; expected {_EXPECTED[api]}, not empty")
        request = cls(api, decoded)
        if api is Api.COMPLETIONS:
            _ = request.prompt  # raises for anything else
        return request

    @property
    def session_id(self) -> str | None:
        """The session that the request belongs to: OpenAI's `prompt_cache_key`."""
        key = self.body.get("prompt_cache_key")
        return key if isinstance(key, str) and key else None

    @property
    def model(self) -> str | None:
        """The name of the engine's model, or of an adapter."""
        name = self.body.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def streamed(self) -> bool:
        return self.body.get("stream") is True

    @property
    def wants_usage(self) -> bool:
        """Does the client want the usage at the end of a stream?"""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def output_tokens(self) -> int | None:
        """The most tokens that the request may generate, if it says so."""
        for name in ("max_completion_tokens", "max_tokens"):
            if isinstance(value := self.body.get(name), int) and value > 0:
                return min(value, MAX_OUTPUT_TOKENS)
        return None

    @property
    def output_limits(self) -> OutputLimits:
        """What it says of its answer's length: `min_tokens` and `ignore_eos` are vLLM's and SGLang's."""
        most, least = self.output_tokens, self.body.get("min_tokens")
        if most is not None and self.body.get("ignore_eos") is True:
            return OutputLimits(most, most)
        return OutputLimits(least if type(least) is int and least > 0 else 0, most)

    @property
    def cache_salt(self) -> str | None:
        salt = self.body.get("cache_salt")
        return salt if isinstance(salt, str) and salt else None

    @property
    def cache_reading(self) -> CacheReading:
        """What it says of reading the engine's prefix cache.

        vLLM computes the whole prompt for `prompt_logprobs` (0 too), and for `logprobs` of a completion with `echo`; SGLang
        from `logprob_start_len` on with `return_logprob`, and the whole prompt for `logprobs` with `echo`.
        """
        body = self.body
        echoes = self.api is Api.COMPLETIONS and body.get("echo") is True and body.get("logprobs") is not None
        skip = body.get("skip_reading_prefix_cache")
        start = body.get("logprob_start_len") if body.get("return_logprob") is True else None
        return CacheReading(
            skip=skip if isinstance(skip, bool) else None,
            prompt_logprobs=body.get("prompt_logprobs") is not None or echoes,
            logprob_start_len=start if type(start) is int and start >= 0 else 0 if echoes else -1,
        )

    @property
    def prompts(self) -> int:
        """The number of prompts of a completion; a chat has one."""
        prompt = self.body.get("prompt")
        nested = self.api is Api.COMPLETIONS and isinstance(prompt, list) and not isinstance(prompt[0], int)
        return len(prompt) if nested else 1  # type: ignore[arg-type]

    @property
    def choices(self) -> int:
        """The number of answers that it asks for to each prompt."""
        n = self.body.get("n")
        return n if isinstance(n, int) and n > 1 else 1

    @property
    def prompt(self) -> str | Sequence[int]:
        """A completion's first prompt: text, or token ids."""
        prompt = self.body["prompt"]
        first = (
            prompt[0] if self.prompts > 1 or (isinstance(prompt, list) and not isinstance(prompt[0], int)) else prompt
        )
        if not isinstance(first, (str, list)):
            raise InvalidValue(f"prompt is {first!r:.80}; expected {_EXPECTED[Api.COMPLETIONS]}")
        return first

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The prompt's token ids, if the body has them."""
        if self.api is Api.CHAT:
            return None
        prompt = self.prompt
        return None if isinstance(prompt, str) else prompt

    @property
    def letters(self) -> int:
        """The approximate length of the text in characters; a token id counts as four."""
        if self.api is Api.CHAT:
            return sum(_letters(message.get("content")) for message in self.messages)
        prompt = self.prompt
        return len(prompt) if isinstance(prompt, str) else 4 * len(prompt)

    @property
    def media_items(self) -> int:
        """The number of images and other parts of a chat that are not text."""
        if self.api is not Api.CHAT:
            return 0
        return sum(
            media_parts(message.get("content")) for message in self.body["messages"] if isinstance(message, dict)
        )

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """A chat's messages. Raises InvalidValue for one that is not an object."""
        messages: list[Any] = self.body["messages"]
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                raise InvalidValue(f"messages.{index} is {message!r:.80}; expected an object")
        return messages


_MEDIA = re.compile("image|audio|video")
_EXPECTED = {Api.CHAT: "a list of messages", Api.COMPLETIONS: "a text or a list of token ids"}


def is_large(body: bytes) -> bool:
    """Would decoding it take long, or much memory? An array takes some 30 times its own bytes."""
    if len(body) <= MAX_PARSED_CONTAINERS:
        return False
    return len(body) > MAX_PARSED_BYTES or body.count(b"[") + body.count(b"{") > MAX_PARSED_CONTAINERS


def check_size(body: bytes) -> None:
    """Raises InvalidValue for a body that is large."""
    if is_large(body):
        expected = f"expected at most {MAX_PARSED_BYTES}, and {MAX_PARSED_CONTAINERS} arrays and objects"
        raise InvalidValue(f"the body has {len(body)} bytes of JSON; {expected}")


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a body that must be a JSON object. Raises InvalidValue, also for a large one."""
    check_size(body)
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidValue(f"the body is a JSON {type(decoded).__name__}; expected an object")
    return decoded


def is_media(part: Any) -> bool:
    """Is a part of a message's content an image, audio or video? Engines take parts without a type by their fields."""
    return isinstance(part, dict) and _MEDIA.search(str(part.get("type") or " ".join(part))) is not None


def media_parts(content: Any) -> int:
    """The number of them in a message's content."""
    return sum(map(is_media, content)) if isinstance(content, list) else 0


def _letters(content: Any) -> int:
    if isinstance(content, str):
        return len(content)
    if not isinstance(content, list):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return sum(len(text) for text in texts if isinstance(text, str))
