"""The token counts in an engine's answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Usage:
    """OpenAI's `usage`. `cached_tokens` None: the engine does not report them.

    vLLM reports them with `--enable-prompt-tokens-details`, SGLang with `--enable-cache-report`.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @classmethod
    def of(cls, answer: Any) -> Self | None:
        """From an answer, or from one event of a stream; None if it has no valid usage."""
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
