"""The token counts in an engine's answer."""

from collections.abc import Mapping
from typing import Any, Self

from kvatlas.dataclass import dataclass

MOST_TOKENS = 1 << 30
"""An engine that reports more than this is not believed."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The `usage` of OpenAI's API. `cached_tokens=None`: the engine does not report cached tokens.

    vLLM reports them if started with `--enable-prompt-tokens-details`; SGLang, with `--enable-cache-report`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @classmethod
    def of(cls, answer: Any) -> Self | None:
        """The usage in an answer, or in one event of a stream; None if there is no valid usage.

        The Responses API and Anthropic's messages report `input_tokens`, the latter without the cached ones; their
        streams carry the usage inside a `response` or a `message`. SGLang's `/generate` reports it in `meta_info`.
        """
        if not isinstance(answer, dict):
            return None
        usage = None
        for one in (answer, answer.get("response"), answer.get("message")):
            if isinstance(one, dict) and (usage := one.get("usage") or one.get("meta_info")):
                break
        if not isinstance(usage, dict):
            return None
        if "prompt_tokens" in usage:
            prompt, completion, details = _read(usage, "prompt_tokens", "completion_tokens", "prompt_tokens_details")
        else:
            prompt, completion, details = _read(usage, "input_tokens", "output_tokens", "input_tokens_details")
        cached = (details if isinstance(details, dict) else usage).get("cached_tokens")
        if not _is_count(prompt):
            return None
        apart = usage.get("cache_read_input_tokens")
        if _is_count(apart):
            created = usage.get("cache_creation_input_tokens")
            prompt, cached = prompt + apart + (created if _is_count(created) else 0), apart
        return cls(
            prompt,
            completion if _is_count(completion) else 0,
            cached if _is_count(cached) else None,
        )


def _is_count(value: Any) -> bool:
    """True if the value is a plausible token count. Whatever an engine reports, sums and records must not overflow."""
    return type(value) is int and 0 <= value <= MOST_TOKENS


def _read(usage: Mapping[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(usage.get(name) for name in names)
