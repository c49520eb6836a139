"""The body of a request for tokens, as much of it as a router needs. The engine checks the rest."""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Self

from kvatlas.blocks.media import MediaItem
from kvatlas.blocks.reuse import CacheReading
from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas.runtime.json_text import decode
from kvatlas.validation import MAX_OUTPUT_TOKENS
from router_client.prompt import OutputLimits

MAX_PARSED_BYTES = 8 << 20
"""Enough for a million token ids with their commas, decoded in about 30 ms."""
MAX_PARSED_CONTAINERS = 1 << 17
LETTERS_A_TOKEN = 4
"""Characters per token for most texts and models."""
MAX_SESSION_LETTERS = 256
"""Longer session names are ignored, because session names are stored and their senders are not trusted."""


class Api(StrEnum):
    """Engine calls whose prompts are read; the value is the path.

    They are OpenAI's three calls, Anthropic's Messages, SGLang's own `/generate`, and vLLM's call with token ids. `is_checked`:
    the router refuses an invalid body; for the other calls, the engine does so in the form of their API. `is_conversation`: the
    engine's chat template makes the prompt.
    """

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    MESSAGES = "/v1/messages"
    RESPONSES = "/v1/responses"
    GENERATE = "/generate"
    TOKENS = "/inference/v1/generate"

    def __init__(self, path: str) -> None:
        self.is_checked = path in ("/v1/completions", "/v1/chat/completions")
        self.is_conversation = path in ("/v1/chat/completions", "/v1/messages", "/v1/responses")


_PROMPTS = {
    Api.COMPLETIONS: ("prompt",),
    Api.CHAT: ("messages",),
    Api.MESSAGES: ("messages",),
    Api.RESPONSES: ("input",),
    Api.GENERATE: ("input_ids", "text"),
    Api.TOKENS: ("token_ids",),
}
"""The fields that hold the prompt; the first one that is present counts."""
_OUTPUT_LIMITS = {
    Api.COMPLETIONS: ("max_tokens",),
    Api.CHAT: ("max_completion_tokens", "max_tokens"),
    Api.MESSAGES: ("max_tokens",),
    Api.RESPONSES: ("max_output_tokens",),
    Api.GENERATE: ("max_new_tokens",),
    Api.TOKENS: ("max_tokens",),
}
"""The fields that limit the number of tokens in an answer. Engines ignore those that belong to other calls."""
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_TOKENS_OR_TEXT = "a text or a list of token ids"
_EXPECTED = {
    Api.COMPLETIONS: _TOKENS_OR_TEXT,
    Api.CHAT: "a list of messages",
    Api.MESSAGES: "a list of messages",
    Api.RESPONSES: "a text or a list of items",
    Api.GENERATE: _TOKENS_OR_TEXT,
    Api.TOKENS: "a list of token ids",
}
_LISTS = (Api.CHAT, Api.MESSAGES, Api.TOKENS)
_NESTED_SAMPLING = (Api.GENERATE, Api.TOKENS)
"""Calls with the fields for sampling in `sampling_params`."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One request. `body` is its unchecked JSON; the properties read what a router needs. `kind` and `scope`: the kind of its
    engines, and its identity scope. The kind and the scope's model determine how a conversation is rendered. Only engines
    that serve the scope and may see its tenant's prompts may tokenize it. None: not known yet."""

    api: Api
    body: Mapping[str, Any]
    kind: EngineKind = EngineKind.VLLM
    scope: Scope | None = None

    @classmethod
    def parse(cls, api: Api, body: bytes) -> Self:
        """Decode and check a body. Raises InvalidValue if it is not a JSON object, or has no prompt or messages."""
        return cls.of(api, parse_object(body))

    @classmethod
    def of(cls, api: Api, decoded: Mapping[str, Any]) -> Self:
        """Like `parse`, for a decoded body."""
        request = cls(api, decoded)
        name, prompt = request.named_prompt
        if not prompt or not isinstance(prompt, list if api in _LISTS else (str, list)):
            raise InvalidValue(f"{name} is {prompt!r:.80}; expected {_EXPECTED[api]}, not empty")
        if not api.is_conversation:
            _ = request.prompt  # raises for anything else
        return request

    def of_engines(self, kind: EngineKind, scope: Scope) -> "TextRequest":
        """The same request, now that its engines are known."""
        return TextRequest(self.api, self.body, kind, scope)

    @property
    def model_id(self) -> str | None:
        """The model that its engines run."""
        return None if self.scope is None else self.scope.model_id

    @property
    def session_id(self) -> str | None:
        """The request's session: OpenAI's `prompt_cache_key`, or the `session_id` of vLLM and SGLang."""
        for name in ("prompt_cache_key", "session_id"):
            if is_session_id(key := self.body.get(name)):
                return str(key)
        return None

    @property
    def model(self) -> str | None:
        """The name of the engine's model, or of an adapter. `/generate` names adapters only."""
        if self.api is Api.GENERATE and isinstance(name := self.body.get("lora_path"), str) and name:
            return name
        name = self.body.get("model")
        return name if isinstance(name, str) and name else None

    @property
    def adapter(self) -> str | None:
        """The adapter that `lora_path` names in addition to the model. Only SGLang reads it, and prefers the adapter in a
        model's name, `base:adapter`. A list, which SGLang takes to be a batch, results in a name for which nothing is
        cached."""
        name = self.body.get("lora_path") if self.kind is EngineKind.SGLANG else None
        return str(name)[:100] if name else None

    @property
    def streamed(self) -> bool:
        return _is_set(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """True if the client gets the usage at the end of a stream. OpenAI's first two calls and vLLM's omit it by default."""
        options = self.body.get("stream_options")
        asks = isinstance(options, dict) and _is_set(options.get("include_usage"))
        return asks or self.api not in (Api.CHAT, Api.COMPLETIONS, Api.TOKENS)

    @property
    def sampling(self) -> Mapping[str, Any]:
        """The fields for sampling, and for the number of tokens."""
        if self.api not in _NESTED_SAMPLING:
            return self.body
        found = self.body.get("sampling_params")
        return found if isinstance(found, dict) else {}

    @property
    def _samplings(self) -> Sequence[Mapping[str, Any]]:
        """The same, as a list: SGLang also accepts a list with one object for each prompt."""
        found = self.body.get("sampling_params") if self.api is Api.GENERATE else None
        return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else (self.sampling,)

    @property
    def output_tokens(self) -> int | None:
        """The request's own limit on generated tokens, if any. If it sets two, the larger one counts, since engines
        differ in which one they prefer."""
        names = _OUTPUT_LIMITS[self.api]
        most = max((_as_integer(one.get(name)) for one in self._samplings for name in names), default=0)
        return min(most, MAX_OUTPUT_TOKENS) if most > 0 else None

    @property
    def output_limits(self) -> OutputLimits:
        """The request's limits on its answer's length. `min_tokens` and `ignore_eos` are fields of vLLM and SGLang."""
        sampling, most = self.sampling, self.output_tokens
        if most is not None and _is_set(sampling.get("ignore_eos")):
            return OutputLimits(most, most)
        least = _as_integer(sampling.get("min_tokens", sampling.get("min_new_tokens")))
        return OutputLimits(max(0, least), most)

    @property
    def cache_salt(self) -> str | None:
        salt = self.body.get("cache_salt")
        return salt if isinstance(salt, str) and salt else None

    @property
    def cache_reading(self) -> CacheReading:
        """The request's limits on reading the engine's prefix cache.

        vLLM computes the whole prompt for `prompt_logprobs` (even if it is 0), and for `logprobs` in a completion with
        `echo`. SGLang computes it from `logprob_start_len` on for `return_logprob`, and all of it for `logprobs` with
        `echo`.
        """
        body, sampling = self.body, self.sampling
        echoes = self.api is Api.COMPLETIONS and body.get("echo") is True and body.get("logprobs") is not None
        skip = sampling.get("skip_reading_prefix_cache")
        start = body.get("logprob_start_len") if body.get("return_logprob") is True else None
        return CacheReading(
            skip=skip if isinstance(skip, bool) else None,
            prompt_logprobs=sampling.get("prompt_logprobs") is not None or echoes,
            logprob_start_len=start if type(start) is int and start >= 0 else 0 if echoes else -1,
        )

    @property
    def named_prompt(self) -> tuple[str, Any]:
        """The field that holds the prompt, and its value."""
        names = _PROMPTS[self.api]
        for name in names:
            if (prompt := self.body.get(name)) is not None:
                return name, prompt
        return names[-1], None

    @property
    def prompts(self) -> int:
        """The number of prompts; a conversation has one."""
        if self.api.is_conversation:
            return 1
        _, prompt = self.named_prompt
        return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1

    @property
    def choices(self) -> int:
        """The number of answers that it asks for per prompt."""
        most = 1
        for one in self._samplings:
            if (asked := one.get("n")) is not None:
                most = max(most, _as_integer(asked))
        return most

    @property
    def all_choices(self) -> int:
        """The total number of answers that the request asks for."""
        return self.choices * self.prompts

    @property
    def prompt(self) -> str | Sequence[int]:
        """The first prompt of a request that is not a conversation: text or token ids."""
        name, prompt = self.named_prompt
        first = prompt[0] if isinstance(prompt, list) and not isinstance(prompt[0], int) else prompt
        if not isinstance(first, list if self.api is Api.TOKENS else (str, list)):
            raise InvalidValue(f"{name} is {first!r:.80}; expected {_EXPECTED[self.api]}")
        return first

    @property
    def other_prompts_tokens(self) -> int:
        """The approximate number of tokens in all prompts but the first."""
        if self.prompts == 1:
            return 0
        _, prompts = self.named_prompt
        texts = sum(len(one) for one in prompts[1:] if isinstance(one, str))
        return texts // LETTERS_A_TOKEN + sum(len(one) for one in prompts[1:] if isinstance(one, list))

    @property
    def token_ids(self) -> Sequence[int] | None:
        """The prompt's token ids, if the body has them and nothing else is part of the prompt."""
        if self.api.is_conversation or self.adds_to_prompt is not None:
            return None
        prompt = self.prompt
        return None if isinstance(prompt, str) else prompt

    @property
    def adds_to_prompt(self) -> str | None:
        """The name of a field that makes the engine compute tokens other than those in the prompt's field; None if there is
        none."""
        return next((name for name in _ADDITIONS.get(self.api, ()) if self.body.get(name)), None)

    @property
    def media(self) -> Sequence[MediaItem]:
        """Images and other media among the token ids of `/inference/v1/generate`, by their hashes and places in `features`.
        Raises InvalidValue if `features` has a different form."""
        features = self.body.get("features") if self.api is Api.TOKENS else None
        return read_media(features) if features else ()

    @property
    def letters(self) -> int:
        """The approximate length of the text in characters; a token id counts as four characters."""
        if not self.api.is_conversation:
            prompt = self.prompt
            return len(prompt) if isinstance(prompt, str) else 4 * len(prompt)
        if self.api is Api.CHAT:
            _ = self.messages  # raises for anything else
        tools = self.body.get("tools")
        named = (self.body.get(name) for name in ("system", "instructions", "messages", "input"))
        return sum(map(_letters, named)) + (len(str(tools)) if tools else 0)

    @property
    def media_items(self) -> int:
        """The number of images and other non-text parts in a conversation."""
        if not self.api.is_conversation:
            return 0
        _, messages = self.named_prompt
        if not isinstance(messages, list):
            return 0
        contents = [one.get("content", one.get("output")) for one in messages if isinstance(one, dict)]
        return sum(media_parts(content) for content in contents if isinstance(content, list))  # most are text

    @property
    def messages(self) -> Sequence[Mapping[str, Any]]:
        """A chat's messages. Raises InvalidValue for one that is not an object."""
        messages: list[Any] = self.body["messages"]
        for index, message in enumerate(messages):
            if not isinstance(message, dict):
                raise InvalidValue(f"messages.{index} is {message!r:.80}; expected an object")
        return messages


_MEDIA = re.compile("image|audio|video")
_ADDITIONS = {
    Api.COMPLETIONS: ("suffix", "prompt_embeds", "truncate_prompt_tokens"),
    Api.GENERATE: ("image_data", "video_data", "audio_data", "input_embeds", "session_params"),
    Api.TOKENS: ("content_parts",),
}
_NESTED = (
    "text",
    "content",
    "output",
    "arguments",
    "thinking",
    "summary",
    "reasoning_content",
    "tool_calls",
    "function",
)
_MOST_NESTED = 6


def _is_set(value: Any) -> bool:
    """A flag as engines read it: they also take 1 and "yes" as true."""
    return value == 1 or (isinstance(value, str) and value.lower() in _TRUE)


def _as_integer(value: Any) -> int:
    """A field's integer as engines read it: they also take 8.0 and "8" as 8. Returns 0 for anything else."""
    if not isinstance(value, (int, float, str)):
        return 0
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        return 0


def is_session_id(value: object) -> bool:
    """True if the value is a valid session name: not too long, and without control characters."""
    return isinstance(value, str) and 0 < len(value) <= MAX_SESSION_LETTERS and value.isprintable()


def read_media(features: Any) -> list[MediaItem]:
    """Hashes and places of images and other media in vLLM's `features`, by modality. Raises InvalidValue."""
    try:
        return [
            MediaItem(name, place["offset"], place["length"])
            for modality, names in (features.get("mm_hashes") or {}).items()
            for name, place in zip(names, features["mm_placeholders"][modality], strict=True)
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidValue(f"features are {features!r:.80}; expected hashes and places by modality") from error


def is_large(body: bytes) -> bool:
    """True if decoding the body would take too long or too much memory. A decoded array takes about 30 times as many
    bytes as its text."""
    if len(body) <= MAX_PARSED_CONTAINERS:
        return False
    return len(body) > MAX_PARSED_BYTES or body.count(b"[") + body.count(b"{") > MAX_PARSED_CONTAINERS


def check_size(body: bytes) -> None:
    """Check the size of a body. Raises InvalidValue for a large one."""
    if is_large(body):
        expected = f"expected at most {MAX_PARSED_BYTES}, and {MAX_PARSED_CONTAINERS} arrays and objects"
        raise InvalidValue(f"the body has {len(body)} bytes of JSON; {expected}")


def parse_object(body: bytes) -> dict[str, Any]:
    """Decode a body that must be a JSON object. Raises InvalidValue, also for a body that is too large."""
    check_size(body)
    try:
        decoded = decode(body)
    except ValueError as error:
        raise InvalidValue(f"the body is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidValue(f"the body is a JSON {type(decoded).__name__}; expected an object")
    return decoded


def is_media(part: Any) -> bool:
    """True if a part of a message's content is an image, audio or video. As in engines, parts without a type are judged by
    their fields."""
    return isinstance(part, dict) and _MEDIA.search(str(part.get("type") or " ".join(part))) is not None


def media_parts(content: Any, nested: int = _MOST_NESTED) -> int:
    """The number of media parts in a message's content, including those in tool results."""
    if not isinstance(content, list) or not nested:
        return 0
    return sum(1 if is_media(part) else media_parts(content_of(part), nested - 1) for part in content)


def content_of(part: Any) -> Any:
    """The content of a message, an item or a part."""
    return part.get("content", part.get("output")) if isinstance(part, dict) else None


def _letters(content: Any, nested: int = _MOST_NESTED) -> int:
    if isinstance(content, str):
        return len(content)
    if not nested or not isinstance(content, (list, dict)):
        return 0
    parts: Iterable[Any] = content if isinstance(content, list) else (content.get(name) for name in _NESTED)
    return sum(_letters(part, nested - 1) for part in parts)
