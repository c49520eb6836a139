"""Rates of the cost profile `engine`, fitted to observed requests. Uses the same regression by which routers learn, but over
all rows in one go and without fading.

A row is one JSON object: `prompt_tokens`, `cached_tokens`, `output_tokens`, `ttft_ms` and `tpot_ms` (either may be
missing), and the engine's load when the request began: `queued_tokens`, `running_requests`, `kv_tokens`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from statistics import fmean, median
from typing import Annotated, Self

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from kvatlas.cost.engine import EngineRates
from kvatlas.cost.learned_rates import FinishedRequest, estimate_of, learned_rates_of, rows_of
from kvatlas.cost.protocol import Load, Plan
from kvatlas.cost.regression import Estimate, Evidence, Latency, Row
from kvatlas.errors import InvalidValue
from kvatlas.validation import describe_invalid

LEAST_ROWS = 8
"""Minimum number of rows for a latency; fewer can't separate its coefficients."""
PASSES = 8
"""Several passes are needed, because a row's weight depends on its error, and the error depends on the estimate."""
MAX_TOKENS = 1 << 30

_Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
_Ms = Annotated[float, Field(gt=0, lt=3.6e6, allow_inf_nan=False)]


class ObservedRequest(BaseModel):
    """One row. Unknown fields are ignored. `kvatlas record` writes such rows."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    prompt_tokens: Annotated[
        int, Field(ge=1, le=MAX_TOKENS, validation_alias=AliasChoices("prompt_tokens", "input_length"))
    ]
    cached_tokens: _Tokens = 0
    output_tokens: Annotated[
        int, Field(ge=0, le=MAX_TOKENS, validation_alias=AliasChoices("output_tokens", "output_length"))
    ] = 1
    queued_tokens: _Tokens = 0
    running_requests: Annotated[int, Field(ge=0, le=1 << 20)] = 0
    kv_tokens: _Tokens = 0
    ttft_ms: _Ms | None = None
    tpot_ms: _Ms | None = None

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Parse one row. Raises InvalidValue, naming the field."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise InvalidValue(describe_invalid(error, "the line")) from error

    def rows(self) -> tuple[Row, ...]:
        """The row's measurements; empty if the engine's queue was too long when the request started."""
        load = Load(self.running_requests, self.queued_tokens, 0, self.kv_tokens)
        plan = Plan("", self.prompt_tokens, self.output_tokens, (), load)
        return rows_of(
            FinishedRequest(
                plan,
                self.prompt_tokens,
                self.output_tokens,
                self.cached_tokens,
                ttft_us=None if self.ttft_ms is None else self.ttft_ms * 1e3,
                tpot_us=None if self.tpot_ms is None else self.tpot_ms * 1e3,
            )
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """How well the fit explains the rows of one latency: their number, the median relative error, and how much of their
    variance it explains (a share)."""

    rows: int
    median_error: float
    explained: float

    @classmethod
    def of(cls, rows: Sequence[Row], estimate: Estimate) -> Self | None:
        """The fit for these rows; None if there are none."""
        if not rows:
            return None
        told = [sum(map(mul, estimate.factors, row.terms)) for row in rows]
        mean_us = fmean(row.us for row in rows)
        spread = sum((row.us - mean_us) ** 2 for row in rows)
        left = sum((row.us - us) ** 2 for row, us in zip(rows, told, strict=True))
        errors = [abs(us - row.us) / row.us for row, us in zip(rows, told, strict=True)]
        return cls(len(rows), median(errors), 1 - left / spread if spread else 1.0)


@dataclass(frozen=True, slots=True)
class Calibration:
    """`rates`: the fitted rates; a rate without evidence keeps its default, or follows another rate
    (`kvatlas.cost.regression.FOLLOWS`). `overhead_us`: a part of every time to the first token, whatever is computed. A fit is
    None if there were no rows for its latency."""

    rates: EngineRates
    overhead_us: float
    first_token: Fit | None
    next_token: Fit | None


def calibrate(observed: Iterable[ObservedRequest]) -> Calibration:
    """Fit the rates. Raises InvalidValue if there are too few rows."""
    measured = [rows for one in observed if (rows := one.rows())]
    by_latency = {latency: [row for rows in measured for row in rows if row.latency is latency] for latency in Latency}
    if max(map(len, by_latency.values())) < LEAST_ROWS:
        found = ", ".join(f"{len(rows)} with a {latency.name}" for latency, rows in by_latency.items())
        raise InvalidValue(f"{found}; expected at least {LEAST_ROWS} rows of either, from engines with a short queue")
    configured = EngineRates()
    estimate = estimate_of(Evidence(), configured)
    for _ in range(PASSES):
        estimate = estimate_of(Evidence.sum_of(Evidence.of(rows, estimate) for rows in measured), configured)
    learned = learned_rates_of(estimate, configured)
    return Calibration(
        learned.rates,
        learned.overhead_us,
        Fit.of(by_latency[Latency.TTFT], estimate),
        Fit.of(by_latency[Latency.TPOT], estimate),
    )
