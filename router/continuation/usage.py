"""The usage of a whole answer, of which several engines generated parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class WholeUsage:
    """`prompt_tokens`, `cached_tokens`: of the client's prompt, as the first engine counted them; None: it did not. `before`:
    the answer's tokens in the prompt of the last engine."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    before: int = 0

    def learn(self, usage: Mapping[str, Any]) -> None:
        """Read a usage of the first engine."""
        self.prompt_tokens = count(usage, "prompt_tokens")
        details = usage.get("prompt_tokens_details")
        cached = count(details, "cached_tokens") if isinstance(details, dict) else None
        self.cached_tokens = self.cached_tokens if cached is None else cached

    def sum(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole usage, from that of the last engine: the prompt is the client's, and the answer is all of it."""
        own = count(usage, "prompt_tokens") or 0
        prompt = own - self.before if self.prompt_tokens is None else self.prompt_tokens
        completion = self.before + (count(usage, "completion_tokens") or 0)
        summed = {**usage, "prompt_tokens": prompt, "completion_tokens": completion}
        if "total_tokens" in usage:
            summed["total_tokens"] = prompt + completion
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and (cached := count(details, "cached_tokens")) is not None:
            first = min(cached, prompt) if self.cached_tokens is None else self.cached_tokens
            summed["prompt_tokens_details"] = {**details, "cached_tokens": first}
        return summed


def count(usage: Mapping[str, Any], name: str) -> int | None:
    """A number of tokens; None if it is none."""
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None
