"""A worker's rates from finished requests: robust linear regression, kept as sums that add up.

A measurement is a **row**: the measured microseconds and, for each rate, the microseconds of its term at the rate's unit. The
model is linear, with one unknown **factor** for each rate (2: twice as slow as its unit):

    measured = sum over RATES of factor × term at its unit

**Evidence** is all that is kept of the rows: the weighted sums A = sum w z z' and b = sum w z u of least squares, and the
recent errors of the rows. Sums can be added up, so routers contribute to one estimate without overwriting each other, and a new
router starts with what was learned. Evidence fades exponentially as more requests follow (MEMORY), and faster while the
estimate is far from the measurements (LOST). The estimate is

    factors = (A + P)^-1 (b + P prior)

where P makes the configured rates worth a fraction of a request, or ties two rates together (a worker that computes twice as
fast also attends twice as fast). This is recursive least squares in information form with a prior and exponential forgetting
(Ljung and Soderstrom, Theory and Practice of Recursive Identification, 1983, chapter 2). A factor that would leave its bounds
is fixed there, and the system is solved again for the others.

**Robust.** Rows are relative, z = term / expected, so that long requests do not drown out short ones. They are never relative
to less than half of the measurement, so a stall has little weight even while the estimate is still far too low. A row that is
off by more than HUBER times the typical error gets less weight (Huber, Robust Estimation of a Location Parameter, 1964):
however late it is, it does not pull harder than one that is slightly late. The typical error is learned as well, from recent
requests.

**Shrunk.** The estimate from a worker's few requests is drawn towards the estimate of its whole pool (Efron and Morris,
Stein's Estimation Rule and Its Competitors, 1973): see `Estimate.shrunk`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import mul
from typing import Final

from kvatlas.errors import InvalidValue


class Rate(IntEnum):
    """The learned rates; the value of a rate is its position in every vector here."""

    OVERHEAD = 0
    PREFILL = 1
    ATTENTION = 2
    REMOTE_HBM = 3
    CPU_DRAM = 4
    LOCAL_SSD = 5
    OBJECT_STORE = 6
    TPOT_BASE = 7
    TPOT_RUNNING = 8
    TPOT_KV = 9


class Latency(IntEnum):
    """The time that a row measures: to the first token, or from one token to the next."""

    TTFT = 0
    TPOT = 1


RATES: Final = len(Rate)
Vector = tuple[float, ...]

MEMORY: Final = 256.0
"""How many requests the evidence covers; older ones fade."""
FIRST_MEMORY: Final = 32.0
"""The value of MEMORY at the start. It grows with the requests, so that rows measured against a poor estimate fade soon."""
ERRORS_MEMORY: Final = 32.0
"""The memory for the typical error. It is always this short, because it has to keep up while the estimate settles."""
PRIOR_WEIGHT: Final = 0.002
"""The weight of the configured rates and of FOLLOWS, in requests; larger at first (`_prior_weight`)."""
LOST: Final = 0.75
"""A typical relative error above this shows that the estimate is outdated; evidence then fades as fast as at the beginning."""
POOL_ROWS: Final = 1.0
"""How many of the worker's own measurements the pool's estimate counts for."""
HUBER: Final = 1.7
"""In mean absolute errors; corresponds to 1.345 standard deviations of normal noise."""
FIRST_ERROR: Final = 0.5
"""The typical relative error before any measurement; it weighs as much as FIRST_ERROR_ROWS rows."""
FIRST_ERROR_ROWS: Final = 4.0
MIN_EXPECTED_US: Final = 1_000.0
MIN_FACTOR: Final = 0.01
MAX_FACTOR: Final = 100.0
"""The bounds of a rate, as multiples of the configured one. The lower bound of rates in MAY_BE_ZERO is 0."""
MAY_BE_ZERO: Final = frozenset({Rate.OVERHEAD, Rate.ATTENTION, Rate.TPOT_RUNNING, Rate.TPOT_KV})
FOLLOWS: Final = {
    Rate.ATTENTION: Rate.PREFILL,
    Rate.OVERHEAD: Rate.TPOT_BASE,
    Rate.TPOT_RUNNING: Rate.TPOT_BASE,
    Rate.TPOT_KV: Rate.TPOT_BASE,
}
"""A rate without evidence of its own changes by the same factor as the rate that it follows."""

FORM: Final = 1
"""Version of the rates and sums. Evidence with a different version is not read."""
ERRORS: Final = 2 * len(Latency)
"""Number of leading sums that are errors."""
_A_AT: Final = ERRORS + RATES
SUMS: Final = _A_AT + RATES * (RATES + 1) // 2
"""The number of sums in a worker's evidence: errors and rows of each latency, then b, then A's lower triangle by rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of `us` microseconds, and the microseconds that each rate's term takes at its unit."""

    latency: Latency
    us: float
    terms: Vector


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence, as the module docstring defines it. `requests`: the number of requests that it comes from, including faded
    ones. `keep` and `errors_keep`: the factors by which it fades the sums and the errors of older evidence.

    Raises InvalidValue if the number of sums is wrong.
    """

    requests: int = 0
    keep: float = 1.0
    errors_keep: float = 1.0
    sums: Vector = (0.0,) * SUMS

    def __post_init__(self) -> None:
        if len(self.sums) != SUMS:
            raise InvalidValue(f"evidence of {len(self.sums)} sums; expected {SUMS}")

    @classmethod
    def of(cls, rows: Sequence[Row], before: "Estimate") -> "Evidence":
        """Evidence from the rows of one request. Their errors are measured against `before`, the estimate before that
        request."""
        sums = [0.0] * SUMS
        for row in rows:
            expected = sum(map(mul, before.factors, row.terms))
            scale = max(expected, row.us / 2, MIN_EXPECTED_US)
            error, typical = abs(row.us - expected) / scale, before.errors[row.latency]
            weight = HUBER * typical / error if error > HUBER * typical else 1.0
            sums[2 * row.latency] += min(error, 3 * typical)
            sums[2 * row.latency + 1] += 1.0
            given = [(i, term / scale) for i, term in enumerate(row.terms) if term]
            for i, z in given:
                sums[ERRORS + i] += weight * z * row.us / scale
                for j, other in given:
                    if j > i:
                        break
                    sums[_A_AT + i * (i + 1) // 2 + j] += weight * z * other
        lost = any(before.errors[row.latency] > LOST for row in rows)
        memory = FIRST_MEMORY if lost else min(max(before.requests, FIRST_MEMORY), MEMORY)
        return cls(1, 1 - 1 / memory, 1 - 1 / ERRORS_MEMORY, tuple(sums))

    @property
    def weight(self) -> float:
        """The weight of the remaining evidence: the trace of A."""
        return sum(self.sums[_A_AT + i * (i + 1) // 2 + i] for i in range(RATES))

    @classmethod
    def sum_of(cls, every: Iterable["Evidence"]) -> "Evidence":
        """The combined evidence of several workers, as if they were a single one."""
        listed = list(every)
        if not listed:
            return cls()
        return cls(
            sum(one.requests for one in listed), sums=tuple(map(sum, zip(*(one.sums for one in listed), strict=True)))
        )

    def fading(self, kept: float) -> "Evidence":
        """The same evidence, except that older evidence to which it is added keeps only this share."""
        return Evidence(self.requests, self.keep * kept, self.errors_keep * kept, self.sums)

    def followed_by(self, newer: "Evidence") -> "Evidence":
        """This evidence, faded by the newer one, plus the newer one. Its twin in Lua is
        `kvatlas/reservations/functions/learn.lua`."""
        errors = [old * newer.errors_keep + new for old, new in zip(self.sums[:ERRORS], newer.sums, strict=False)]
        rest = [old * newer.keep + new for old, new in zip(self.sums[ERRORS:], newer.sums[ERRORS:], strict=True)]
        return Evidence(
            self.requests + newer.requests,
            self.keep * newer.keep,
            self.errors_keep * newer.errors_keep,
            (*errors, *rest),
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Factors by `Rate`, and the typical relative error by `Latency`, from a number of requests. `rows`: how many measurements
    of each latency the evidence is worth now. `weight`: the weight of the evidence."""

    requests: int
    factors: Vector
    errors: Vector
    rows: Vector = (0.0,) * len(Latency)
    weight: float = 0.0

    @classmethod
    def of(cls, evidence: Evidence, prior: Vector) -> "Estimate":
        """Solve for the factors. `prior`: the configured rates, as multiples of the units; a prior of 0 stays 0. Takes 0.1 to
        0.3 ms."""
        sums = evidence.sums
        errors = tuple(
            (sums[2 * latency] + FIRST_ERROR * FIRST_ERROR_ROWS) / (sums[2 * latency + 1] + FIRST_ERROR_ROWS)
            for latency in Latency
        )
        # solve in multiples of the configured rates, so that each prior is 1
        a = [[0.0] * RATES for _ in Rate]
        at = _A_AT
        for i in range(RATES):
            for j in range(i + 1):
                a[i][j] = a[j][i] = sums[at] * prior[i] * prior[j]
                at += 1
        known = [row[:] for row in a]
        b = [total * scale for total, scale in zip(sums[ERRORS:_A_AT], prior, strict=True)]
        weight = _prior_weight(evidence.requests)
        for rate in Rate:
            a[rate][rate] += weight
            if (other := FOLLOWS.get(rate)) is None:
                b[rate] += weight
            else:
                a[other][other] += weight
                a[rate][other] -= weight
                a[other][rate] -= weight
        found = _solve_within_bounds(a, b)
        return cls(evidence.requests, tuple(map(mul, found, prior)), errors, _count_rows(known, found), evidence.weight)

    def shrunk(self, pool: "Estimate", kept: float = 1.0) -> "Estimate":
        """The estimate of one worker, drawn towards its pool's estimate as if POOL_ROWS measurements had confirmed the latter:
        a few rows say little about one worker. `kept`: the share of the worker's evidence that still counts."""
        factors = []
        shares = [rows * kept / (rows * kept + POOL_ROWS) for rows in self.rows]
        for rate, mine, theirs in zip(Rate, self.factors, pool.factors, strict=True):
            share = shares[_latency_of(rate)]
            if (
                mine > 0 and theirs > 0
            ):  # geometric: halfway between ten times as fast and ten times as slow is "equally fast"
                factors.append(mine**share * theirs ** (1 - share))
            else:
                factors.append(mine * share + theirs * (1 - share))
        return replace(self, factors=tuple(factors))


def _latency_of(rate: Rate) -> Latency:
    return Latency.TPOT if rate >= Rate.TPOT_BASE else Latency.TTFT


def _count_rows(a: list[list[float]], x: Vector) -> Vector:
    """The number of rows of each latency that are left in A: a row that matches the estimate adds 1 to x' A x over its rates,
    minus what has faded."""
    rows = [0.0] * len(Latency)
    for rate in Rate:
        rows[_latency_of(rate)] += x[rate] * sum(map(mul, a[rate], x))
    return tuple(rows)


def _prior_weight(requests: int) -> float:
    """The weight of the prior after this many requests. An engine's first requests are its slowest (it compiles, and fills its
    pools). If they made it look slow right away, it would not get the requests that show how fast it is."""
    return PRIOR_WEIGHT + 1 / (1 + requests) ** 2


def _solve_within_bounds(a: list[list[float]], b: list[float]) -> Vector:
    """Solve a x = b. An x outside its bounds is fixed at the nearer bound, and the system is solved again for the others."""
    x = [0.0] * RATES
    free = list(range(RATES))
    while free:
        rest = [b[i] - sum(a[i][j] * x[j] for j in range(RATES) if j not in free) for i in free]
        outside = False
        for i, value in zip(list(free), _solve([[a[i][j] for j in free] for i in free], rest), strict=True):
            if not math.isfinite(value):  # impossible measurements lead to sums that are too far apart for floats
                value = 1.0
            x[i] = min(max(value, 0.0 if i in MAY_BE_ZERO else MIN_FACTOR), MAX_FACTOR)
            if x[i] != value:
                free.remove(i)
                outside = True
        if not outside:
            break
    return tuple(x)


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """Solve a x = b by Cholesky decomposition: `a` is symmetric and, because of the prior, positive definite."""
    low: list[list[float]] = []
    x: list[float] = []
    for i, row in enumerate(a):
        mine: list[float] = []
        for j in range(i):
            mine.append((row[j] - sum(map(mul, mine, low[j]))) / low[j][j])
        mine.append(math.sqrt(max(row[i] - sum(value * value for value in mine), 1e-12)))
        low.append(mine)
        x.append((b[i] - sum(map(mul, mine, x))) / mine[i])
    for i in reversed(range(len(x))):
        x[i] = (x[i] - sum(low[k][i] * x[k] for k in range(i + 1, len(x)))) / low[i][i]
    return x
