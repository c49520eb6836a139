"""What an engine says of a request's tokens in its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Usage:
    """OpenAI's `usage`. `cached_tokens` None: the engine does not tell.

    vLLM tells with `--enable-prompt-tokens-details`, SGLang with `--enable-cache-report`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @classmethod
    def of(cls, answer: Any) -> Self | None:
        """Of an answer, or of one event of a stream; None without one, or where it is no usage."""
        usage = answer.get("usage") if isinstance(answer, Mapping) else None
        if not isinstance(usage, Mapping):
            return None
        prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
        if not isinstance(prompt, int):
            return None
        return cls(
            prompt,
            completion if isinstance(completion, int) else 0,
            cached if isinstance(cached, int) else None,
        )
