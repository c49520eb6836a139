"""What engines say of prompts beside what the router took them for: a wrong tokenizer shows here first."""

from dataclasses import dataclass, field

from router_client.tokens.usage import Usage


@dataclass(slots=True)
class TokenCounters:
    """Plain integers since the router began.

    `tokenized`, `given` (token ids in the request itself), and those without tokens by reason: `late`, `busy`,
    `unsupported`, `failed`. `prompts_equal` and `prompts_differ`: the engine's prompt tokens beside ours. `cached_*`:
    its cached tokens beside the predicted ones; `cached_untold`: it does not tell them.
    """

    tokenized: int = 0
    given: int = 0
    late: int = 0
    busy: int = 0
    unsupported: int = 0
    failed: int = 0
    time_us: int = 0
    prompts_equal: int = 0
    prompts_differ: int = 0
    cached_equal: int = 0
    cached_more: int = 0
    cached_less: int = 0
    cached_untold: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class TokenComparison:
    """Counts each answer, and says in one line what is wrong, if something is."""

    counters: TokenCounters = field(default_factory=TokenCounters)
    _example: str = ""

    def add(self, usage: Usage, *, prompt_tokens: int | None, predicted_tokens: int | None) -> None:
        """`prompt_tokens` and `predicted_tokens` are ours; None where there are none to compare."""
        counters = self.counters
        if prompt_tokens is not None:
            if usage.prompt_tokens == prompt_tokens:
                counters.prompts_equal += 1
            else:
                counters.prompts_differ += 1
                self._example = f"{usage.prompt_tokens} tokens where the router counted {prompt_tokens}"
        if predicted_tokens is None:
            return
        if usage.cached_tokens is None:
            counters.cached_untold += 1
            return
        counters.predicted_tokens += predicted_tokens
        counters.cached_tokens += usage.cached_tokens
        if usage.cached_tokens == predicted_tokens:
            counters.cached_equal += 1
        elif usage.cached_tokens > predicted_tokens:
            counters.cached_more += 1
        else:
            counters.cached_less += 1

    def findings(self) -> list[str]:
        """What somebody should look at, a line each; empty where nothing is."""
        counters, lines = self.counters, []
        if counters.prompts_differ:
            total = counters.prompts_equal + counters.prompts_differ
            lines.append(
                f"the tokenizer is not the engine's: {counters.prompts_differ} of {total} prompts differ, the last had "
                f"{self._example}; check its files and the chat template, or ask the engine (--tokenizer engine)"
            )
        if counters.cached_untold and not counters.cached_equal + counters.cached_more + counters.cached_less:
            lines.append(
                "engines don't tell cached tokens: start vLLM with --enable-prompt-tokens-details, SGLang with "
                "--enable-cache-report"
            )
        without = counters.late + counters.busy + counters.failed
        if without > counters.tokenized // 20:
            lines.append(
                f"{without} requests were routed without their tokens ({counters.late} late, {counters.busy} too many at "
                f"once, {counters.failed} failed)"
            )
        return lines
