"""Generated workloads: many sessions of several turns that share system prompts. The same settings give the same workload.

    workload = generate_workload(WorkloadSettings(seed=7, sessions=20))
    conversation = Conversation(workload.sessions[0])
    while (turn := conversation.next_turn()) is not None:
        answer = ...  # POST turn.prompt and turn.max_tokens, after turn.pause_us
        conversation.add_answer(answer.token_ids)

Times are simulated microseconds: divide by the engines' speed-up for real time.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvatlas_simulator.engine.tokenizer import BYTE_TOKENS

_Positive = Annotated[int, Field(ge=1)]


class WorkloadSettings(BaseModel):
    """Settings of a workload. Values are drawn uniformly from the ranges, including both ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int = 0
    sessions: _Positive = 32
    arrivals_per_s: float = Field(default=4.0, gt=0)
    """Number of sessions that begin per second, as a Poisson process."""
    turns: tuple[_Positive, _Positive] = (2, 6)
    system_prompts: _Positive = 4
    system_prompt_tokens: tuple[_Positive, _Positive] = (512, 2_048)
    popularity_skew: float = Field(default=1.0, ge=0)
    """The k-th system prompt is drawn with a weight of 1 / k ** skew; 0: all equally often."""
    user_tokens: tuple[_Positive, _Positive] = (16, 256)
    """The user's part of one turn."""
    answer_tokens: tuple[_Positive, _Positive] = (16, 128)
    think_s: float = Field(default=2.0, ge=0)
    """Mean of the pause between an answer and the next turn, exponentially distributed."""
    adapters: tuple[str, ...] = ()
    """Each session uses one of these or none, all equally often."""
    vocab_size: int = Field(default=32_000, gt=BYTE_TOKENS)
    """Token ids are at least BYTE_TOKENS and below it."""

    @model_validator(mode="after")
    def _check_ranges(self) -> "WorkloadSettings":
        for name in ("turns", "system_prompt_tokens", "user_tokens", "answer_tokens"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} is {low} to {high}; expected the smaller number first")
        return self


def chat_settings(*, seed: int, sessions: int, arrivals_per_s: float) -> WorkloadSettings:
    """Conversations with long system prompts; a few of these are shared by many sessions."""
    return WorkloadSettings(
        seed=seed,
        sessions=sessions,
        arrivals_per_s=arrivals_per_s,
        turns=(2, 6),
        system_prompts=12,
        system_prompt_tokens=(1_024, 3_072),
        popularity_skew=0.6,
        user_tokens=(32, 256),
        answer_tokens=(16, 64),
        think_s=2.0,
    )


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user's addition to a conversation, and the maximum length of the answer."""

    token_ids: tuple[int, ...]
    max_tokens: int
    pause_us: int
    """Pause between the last answer, or the session's arrival, and this turn."""


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation, without the answers."""

    session_id: str
    arrival_us: int
    """Time since the start of the workload."""
    system_prompt: tuple[int, ...]
    turns: tuple[UserTurn, ...]
    adapter: str | None = None

    def prompt(self, answers: Sequence[Sequence[int]]) -> list[int]:
        """The tokens of the turn after these answers, one for each earlier turn."""
        token_ids = list(self.system_prompt)
        for turn, answer in zip(self.turns, answers, strict=False):
            token_ids += turn.token_ids
            token_ids += answer
        return token_ids + list(self.turns[len(answers)].token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to send."""

    session_id: str
    turn_index: int
    pause_us: int
    prompt: list[int]
    max_tokens: int
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions in order of arrival."""

    sessions: tuple[Session, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def prompt_tokens(self) -> int:
        """Total prompt tokens of all requests, if every answer is `max_tokens` long."""
        total = 0
        for session in self.sessions:
            length = len(session.system_prompt)
            for turn in session.turns:
                length += len(turn.token_ids)
                total += length
                length += turn.max_tokens
        return total


class Conversation:
    """A session in progress: gives the next request once the answer to the last one is known."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._answers: list[tuple[int, ...]] = []

    def next_turn(self) -> Turn | None:
        """The request that is due; None after the last answer."""
        index = len(self._answers)
        if index == len(self.session.turns):
            return None
        turn = self.session.turns[index]
        return Turn(
            session_id=self.session.session_id,
            turn_index=index,
            pause_us=turn.pause_us,
            prompt=self.session.prompt(self._answers),
            max_tokens=turn.max_tokens,
            adapter=self.session.adapter,
        )

    def add_answer(self, token_ids: Sequence[int]) -> None:
        """Add the engine's answer to the last request. Raises ValueError if no request is due."""
        if len(self._answers) == len(self.session.turns):
            raise ValueError(f"session {self.session.session_id} has all its {len(self._answers)} answers")
        self._answers.append(tuple(token_ids))


def generate_workload(settings: WorkloadSettings) -> Workload:
    """Generate the workload for these settings."""
    rng = random.Random(settings.seed)

    def tokens(length: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.choices(range(BYTE_TOKENS, settings.vocab_size), k=rng.randint(*length)))

    system_prompts = [tokens(settings.system_prompt_tokens) for _ in range(settings.system_prompts)]
    weights = [1 / rank**settings.popularity_skew for rank in range(1, settings.system_prompts + 1)]
    arrival_s = 0.0
    sessions = []
    for number in range(settings.sessions):
        sessions.append(
            Session(
                session_id=f"session-{number}",
                arrival_us=round(arrival_s * 1e6),
                system_prompt=rng.choices(system_prompts, weights)[0],
                turns=tuple(
                    UserTurn(
                        token_ids=tokens(settings.user_tokens),
                        max_tokens=rng.randint(*settings.answer_tokens),
                        pause_us=round(rng.expovariate(1 / settings.think_s) * 1e6) if turn and settings.think_s else 0,
                    )
                    for turn in range(rng.randint(*settings.turns))
                ),
                adapter=rng.choice([None, *settings.adapters]),
            )
        )
        arrival_s += rng.expovariate(settings.arrivals_per_s)
    return Workload(tuple(sessions))
