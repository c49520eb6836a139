"""Settings of a replay: flags and environment variables, as for every command."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_settings import NoDecode

from kvatlas.cost.rates_file import read_rates
from kvatlas.settings import CommaList, ProcessSettings
from kvatlas.validation import Count, Positive
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.hybrid_cache.groups import parse_groups
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.miss_ratio import SIZES
from kvatlas_simulator.lab.policies.catalogue import DEFAULT_POLICIES, DYNAMO_POLICIES, LIVE_POLICIES, POLICIES
from kvatlas_simulator.lab.study import Point
from kvatlas_simulator.lab.summary import Objective

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
    """Requests to replay, and fleets to replay them against. If fields have several values, every combination is
    replayed."""

    policies: CommaList = Field(
        default=DEFAULT_POLICIES,
        description=f"Policies to compare, of: {', '.join(POLICIES)}; all: every one, dynamo only with "
        "--dynamo-python.",
    )
    workers: _Counts = Field(default=(16,), description="Simulated workers.")
    cache_tokens: _Counts = Field(default=(500_000,), description="Tokens that each worker's GPU cache holds.")
    cpu_tokens: Count = Field(default=0, description="Tokens that each worker's CPU tier holds; 0: no CPU tier.")
    groups: CommaList = Field(
        default=("full",),
        description="KV cache groups of the model, as `kvatlas simulate-engine` takes them: full, swa:WINDOW, chunked:SIZE, "
        "mamba; several share each worker's cache.",
    )
    retention_interval: Count = Field(
        default=0,
        description="Hybrids: sliding windows and mamba also keep what a request needs at multiples of this many tokens.",
    )
    speed: _Factors = Field(default=(1.0,), description="Requests arrive this many times as fast as in the trace.")
    event_delay_ms: _Delays = Field(default=(5.0,), description="Time from an engine's step to the index.")
    event_loss: _Shares = Field(default=(0.0,), description="Fraction of the publishers' messages that are lost.")
    seeds: int = Field(default=3, ge=1, le=100, description="Replays of each policy, with different seeds.")
    seed: Count = Field(default=0, description="The first seed.")
    slo_ttft_ms: float = Field(
        default=2_000.0, gt=0, description="A good request has its first token within this time."
    )
    slo_tpot_ms: float = Field(default=100.0, gt=0, description="And at most this mean time for each later token.")
    prefill_us_per_token: float = Field(
        default=_RATES.prefill_us_per_token, ge=0, description="Microseconds to compute a prompt token."
    )
    decode_step_us: float = Field(
        default=_RATES.decode_step_us, gt=0, description="Microseconds of a step in which anything decodes."
    )
    rates_file: Path | None = Field(
        default=None,
        description="File with rates that replaces these costs, written by `kvatlas calibrate`; default: none.",
    )
    requests: Positive | None = Field(default=None, description="Replay only the first requests; default: all.")
    jobs: Positive = Field(default=os.cpu_count() or 1, description="Replays to run in parallel.")
    curve: bool = Field(
        default=False, description="Print, instead of policies, the hit rate of one cache for all requests by its size."
    )
    curve_replays: int = Field(
        default=3, ge=0, le=SIZES, description="Sizes of the curve that are replayed as well, to show its error."
    )
    good_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Search, for each policy, the fewest workers with which this share of the requests is good; --workers is "
        "then the most that are tried. Default: no search.",
    )
    live: bool = Field(
        default=False,
        description="Replay over real NATS and Valkey servers, indexer, publishers and router clients, in scaled real time; "
        f"policies {', '.join(LIVE_POLICIES)} only.",
    )
    live_scale: float = Field(default=1.0, gt=0, le=1_000, description="With --live: virtual seconds in a real one.")
    dynamo_python: str | None = Field(
        default=None, description="For policy dynamo: the Python that has ai-dynamo-runtime; default: this one."
    )
    picture: Path | None = Field(default=None, description="Where to save a picture; default: none.")

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        if policies == ("all",):
            return policies
        if not policies or any(policy not in POLICIES for policy in policies):
            raise ValueError(f"expected some of {', '.join(POLICIES)}, or all")
        return tuple(dict.fromkeys(policies))

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if len(parse_groups(groups)) > 1 and info.data.get("cpu_tokens"):
            raise ValueError("expected one group with --cpu-tokens")
        return groups

    @field_validator("curve")
    @classmethod
    def _check_curve(cls, curve: bool, info: ValidationInfo) -> bool:
        if curve and len(info.data.get("groups", ())) > 1:
            raise ValueError(
                "expected one group with --curve: what hybrids reuse does not only depend on the cache's size"
            )
        return curve

    @field_validator("live")
    @classmethod
    def _check_live(cls, live: bool, info: ValidationInfo) -> bool:
        if live and info.data.get("good_share") is not None:
            raise ValueError("expected no --good-share with --live: other fleet sizes are replayed in virtual time")
        return live

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(parse_groups(self.groups), self.retention_interval)

    @property
    def named_policies(self) -> tuple[str, ...]:
        """The chosen policies' names; `all` is expanded."""
        if self.policies != ("all",):
            return self.policies
        return tuple(name for name in POLICIES if name not in DYNAMO_POLICIES or self.dynamo_python is not None)

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
        if self.rates_file is None:
            return StepCost(self.prefill_us_per_token, self.decode_step_us)
        rates = read_rates(self.rates_file)
        return StepCost(
            rates.prefill_us_per_token, rates.tpot_base_us, rates.tpot_us_per_running, rates.tpot_us_per_kv_token
        )

    @property
    def objective(self) -> Objective:
        return Objective(self.slo_ttft_ms, self.slo_tpot_ms)
