"""The usage of a whole answer that several engines generated in parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router_client.learning.token_counts import Usage


@dataclass(slots=True)
class WholeUsage:
    """`prompt_tokens`, `cached_tokens`: those of the client's prompt, as counted by the first engine; None if it did not
    count them. `completion_tokens`: those of the answer so far (None: not counted yet); `details`: how the first engine
    divides them. `before`: the answer's tokens that were part of the last engine's prompt. `apart`: how many of the tokens
    before the end of the reasoning are not counted as reasoning by the first engine; None if it does not count reasoning."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    details: Mapping[str, Any] | None = None
    before: int = 0
    apart: int | None = None

    def learn(self, usage: Mapping[str, Any], *, first: bool) -> None:
        """Read an engine's usage. `first`: this engine is the first one."""
        own = count(usage, "prompt_tokens")
        details = usage.get("prompt_tokens_details")
        cached = count(details, "cached_tokens") if isinstance(details, dict) else None
        if first:
            self.prompt_tokens = own
            self.cached_tokens = self.cached_tokens if cached is None else cached
            self.details = usage.get("completion_tokens_details")
        elif self.prompt_tokens is None and own is not None:
            self.prompt_tokens = max(0, own - self.before)
        if not first and self.cached_tokens is None and cached is not None and self.prompt_tokens is not None:
            self.cached_tokens = min(cached, self.prompt_tokens)
        if (completion := count(usage, "completion_tokens")) is not None:
            self.completion_tokens = self.before + completion

    def learn_reasoning(self) -> None:
        """Learn how the first engine counts reasoning tokens. Call this right after `learn`, if the usage arrived together
        with a part of the reasoning."""
        counted = count(self.details or {}, "reasoning_tokens")
        if self.apart is None and counted:
            self.apart = (self.completion_tokens or 0) - counted

    def count_reasoning(self, behind: int) -> None:
        """Count all tokens so far, except the last `behind`, as reasoning."""
        if self.apart is not None:
            counted = (self.completion_tokens or 0) - behind - self.apart
            self.details = {**(self.details or {}), "reasoning_tokens": counted}

    def cap(self, most: int | None) -> None:
        """Apply the answer's maximum number of tokens. An estimate of how many tokens an engine was given may exceed it."""
        if most is not None and self.completion_tokens is not None:
            self.completion_tokens = min(self.completion_tokens, most)

    def add_reasoning(self, usage: Mapping[str, Any]) -> None:
        """Add the reasoning tokens that a later engine counts in its own part."""
        details = usage.get("completion_tokens_details")
        own = count(details, "reasoning_tokens") if isinstance(details, dict) else None
        if self.apart is not None and own is not None:
            before = self.before - self.apart if self.before else 0
            self.details = {**(self.details or {}), "reasoning_tokens": before + own}

    @property
    def whole(self) -> Usage | None:
        """The usage of the client's request; None if no engine has counted its tokens."""
        if self.prompt_tokens is None:
            return None
        return Usage(self.prompt_tokens, self.completion_tokens or 0, self.cached_tokens)

    def sum(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """An engine's usage, after `learn`, in terms of the client's request."""
        prompt, completion = self.prompt_tokens or 0, self.completion_tokens or 0
        summed = {**usage, "prompt_tokens": prompt, "completion_tokens": completion}
        if "total_tokens" in usage:
            summed["total_tokens"] = prompt + completion
        if self.details is not None:
            summed["completion_tokens_details"] = self.details
            if "reasoning_tokens" in usage and "reasoning_tokens" in self.details:
                summed["reasoning_tokens"] = self.details["reasoning_tokens"]
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and self.cached_tokens is not None:
            summed["prompt_tokens_details"] = {**details, "cached_tokens": self.cached_tokens}
        return summed


def count(usage: Mapping[str, Any], name: str) -> int | None:
    """The number of tokens in a field of the usage; None if there is no such number."""
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else None
