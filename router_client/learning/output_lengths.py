"""Lengths of answers, learned from the answers that this router has seen: for each session, and for each pool by the
length that requests allow.

A request limits the length of its answer, but clients write any number there: 4,096 for an answer of 200 tokens. So the
lengths of answers to similar requests are used instead or, until there are any, the limit.
"""

from collections import OrderedDict
from dataclasses import dataclass

from router_client.prompt import OutputLimits, Prompt

POOL_MEMORY = 64
SESSION_MEMORY = 8
"""Number of answers that a mean represents; older ones fade."""
POOL_WORTH = 2.0
"""Weight of the pool's mean, as a number of answers in a session. For a pool, the request's limit has half of that
weight."""
MOST_SESSIONS = 16_384


@dataclass(slots=True)
class _Mean:
    answers: int = 0
    tokens: float = 0.0

    def add(self, tokens: int, memory: int) -> None:
        self.answers = min(self.answers + 1, memory)
        self.tokens += (tokens - self.tokens) / self.answers

    def mixed_with(self, other: float, worth: float) -> float:
        return (self.tokens * self.answers + other * worth) / (self.answers + worth)


class OutputLengths:
    """Output lengths for one router."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, int], _Mean] = {}
        self._sessions: OrderedDict[tuple[str, str], _Mean] = OrderedDict()

    def expect(self, prompt: Prompt) -> int:
        """The expected length, in tokens, of the answer to a prompt, within the prompt's limits."""
        limits = prompt.output_limits or OutputLimits()
        expected = float(prompt.output_tokens if limits.most is None else limits.most)
        pool_id = prompt.scope.pool_id
        if (mean := self._pools.get((pool_id, _size_class(limits)))) is not None:
            expected = mean.mixed_with(expected, POOL_WORTH / 2)
        if prompt.session_id and (mean := self._sessions.get((pool_id, prompt.session_id))) is not None:
            expected = mean.mixed_with(expected, POOL_WORTH)
        return limits.clamp(round(expected))

    def record(self, prompt: Prompt, output_tokens: int) -> None:
        """Record the length of the answer to a prompt."""
        if output_tokens < 1:
            return
        pool_id = prompt.scope.pool_id
        size = _size_class(prompt.output_limits or OutputLimits())
        self._pools.setdefault((pool_id, size), _Mean()).add(output_tokens, POOL_MEMORY)
        if prompt.session_id:
            session = pool_id, prompt.session_id
            self._sessions.setdefault(session, _Mean()).add(output_tokens, SESSION_MEMORY)
            self._sessions.move_to_end(session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)


def _size_class(limits: OutputLimits) -> int:
    """A class of requests whose limits are within a factor of 2."""
    return 0 if limits.most is None else limits.most.bit_length()
