"""Settings of a replay: flags and environment variables, as for every command."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode

from kvatlas.settings import CommaList, ProcessSettings
from kvatlas.validation import Count, Positive
from simulator.engine.step_cost import StepCost
from simulator.lab.comparison import Point
from simulator.lab.policies.catalogue import DEFAULT_POLICIES, POLICIES
from simulator.lab.summary import Objective

_RATES = StepCost()


def _split(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


_Counts = Annotated[
    tuple[Annotated[int, Field(ge=1, le=1 << 40)], ...], NoDecode, BeforeValidator(_split), Field(min_length=1)
]
_Factors = Annotated[
    tuple[Annotated[float, Field(gt=0, le=1e6)], ...], NoDecode, BeforeValidator(_split), Field(min_length=1)
]
_Delays = Annotated[
    tuple[Annotated[float, Field(ge=0, le=1e9)], ...], NoDecode, BeforeValidator(_split), Field(min_length=1)
]
_Shares = Annotated[
    tuple[Annotated[float, Field(ge=0, lt=1)], ...], NoDecode, BeforeValidator(_split), Field(min_length=1)
]


class ReplaySettings(ProcessSettings):
    """What is replayed, against which fleets. Several values of a field: every combination is replayed."""

    policies: CommaList = Field(
        default=DEFAULT_POLICIES, description=f"Policies to compare, of: {', '.join(POLICIES)}; all: every one."
    )
    workers: _Counts = Field(default=(16,), description="Simulated workers.")
    cache_tokens: _Counts = Field(default=(500_000,), description="Tokens that each worker's GPU cache holds.")
    cpu_tokens: Count = Field(default=0, description="Tokens that each worker's CPU tier holds; 0: no CPU tier.")
    speed: _Factors = Field(default=(1.0,), description="How many times as fast as in the trace requests arrive.")
    event_delay_ms: _Delays = Field(default=(5.0,), description="Time from an engine's step to the index.")
    event_loss: _Shares = Field(default=(0.0,), description="Fraction of the publishers' messages that are lost.")
    seeds: int = Field(default=3, ge=1, le=100, description="Replays of each policy, with different seeds.")
    seed: Count = Field(default=0, description="The first seed.")
    slo_ttft_ms: float = Field(
        default=2_000.0, gt=0, description="A good request has its first token within this time."
    )
    slo_tpot_ms: float = Field(default=100.0, gt=0, description="And this mean time for each further one.")
    prefill_us_per_token: float = Field(
        default=_RATES.prefill_us_per_token, ge=0, description="Microseconds to compute a prompt token."
    )
    decode_step_us: float = Field(
        default=_RATES.decode_step_us, gt=0, description="Microseconds of a step in which anything decodes."
    )
    requests: Positive | None = Field(default=None, description="Replay only the first requests; default: all.")
    jobs: Positive = Field(default=os.cpu_count() or 1, description="Replays at the same time.")
    picture: Path | None = Field(default=None, description="Where to save a picture; default: none.")

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        if policies == ("all",):
            return tuple(POLICIES)
        if not policies or any(policy not in POLICIES for policy in policies):
            raise ValueError(f"expected some of {', '.join(POLICIES)}, or all")
        return tuple(dict.fromkeys(policies))

    @property
    def points(self) -> list[Point]:
        return [
            Point(workers, cache_tokens, speed, delay_ms, loss)
            for speed in self.speed
            for workers in self.workers
            for cache_tokens in self.cache_tokens
            for delay_ms in self.event_delay_ms
            for loss in self.event_loss
        ]

    @property
    def cost(self) -> StepCost:
        return StepCost(self.prefill_us_per_token, self.decode_step_us)

    @property
    def objective(self) -> Objective:
        return Objective(self.slo_ttft_ms, self.slo_tpot_ms)
