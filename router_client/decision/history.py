"""A readable history of the last few minutes: choices per worker, how much of the prompts was cached, and the latest
choices."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

STEP_S = 10.0
STEPS = 30
LAST = 24


@dataclass(slots=True)
class Tally:
    """The choices of one worker. `without_index`: choices made by load or prefix alone. `cached_tokens`: those of
    `prompt_tokens` that were predicted to be cached. `answer_tokens`: prompt tokens of answers that report cached tokens;
    `found_tokens`: the cached tokens that they report."""

    choices: int = 0
    without_index: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    found_tokens: int = 0

    def add(self, other: "Tally") -> None:
        self.choices += other.choices
        self.without_index += other.without_index
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.answer_tokens += other.answer_tokens
        self.found_tokens += other.found_tokens


class PastDecision(NamedTuple):
    """One choice. `at_us`: microseconds since 1970. `ttft_us=None`: the cost profile does not predict it. `basis`: the
    basis of the choice; `why`: set unless it was made by cost."""

    at_us: int
    worker_id: str
    model_id: str
    prompt_tokens: int
    cached_tokens: int
    ttft_us: int | None
    basis: str
    why: str


class DecisionHistory:
    """Bounded: holds STEPS intervals of STEP_S each, with the workers chosen in them, and the most recent choices (at
    most LAST)."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[tuple[int, dict[str, Tally]]] = deque(maxlen=STEPS)
        self.last: deque[PastDecision] = deque(maxlen=LAST)
        """The newest is last."""

    def record(self, decision: PastDecision, *, without_index: bool) -> None:
        tally = self._tally(decision.worker_id)
        tally.choices += 1
        tally.without_index += without_index
        tally.prompt_tokens += decision.prompt_tokens
        tally.cached_tokens += decision.cached_tokens
        self.last.append(decision)

    def record_answer(self, worker_id: str, prompt_tokens: int, found_tokens: int) -> None:
        """Record how many of a prompt's tokens the worker's engine found cached."""
        tally = self._tally(worker_id)
        tally.answer_tokens += prompt_tokens
        tally.found_tokens += found_tokens

    def by_worker(self) -> dict[str, Tally]:
        """The tallies over the last STEPS intervals, by worker."""
        found: dict[str, Tally] = {}
        for step in self._recent():
            for worker_id, tally in step.items():
                found.setdefault(worker_id, Tally()).add(tally)
        return found

    def by_step(self) -> Sequence[int]:
        """The number of choices in each of the last STEPS intervals, the current one last."""
        counts = {number: sum(tally.choices for tally in step.values()) for number, step in self._steps}
        now = self._now()
        return [counts.get(number, 0) for number in range(now - STEPS + 1, now + 1)]

    def _recent(self) -> list[dict[str, Tally]]:
        oldest = self._now() - STEPS
        return [step for number, step in self._steps if number > oldest]

    def _tally(self, worker_id: str) -> Tally:
        now = self._now()
        if not self._steps or self._steps[-1][0] != now:
            self._steps.append((now, {}))
        step = self._steps[-1][1]
        tally = step.get(worker_id)
        if tally is None:
            tally = step[worker_id] = Tally()
        return tally

    def _now(self) -> int:
        return int(self._clock() // STEP_S)
