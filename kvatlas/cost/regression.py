"""What finished requests say of a worker's rates: robust linear regression, kept as sums that add up.

A measurement is a **row**: the microseconds measured, and those that each rate's term would take at its unit. They are
linear in one unknown **factor** a rate (2: twice as slow as its unit):

    measured = sum over RATES of factor x term at its unit

**Evidence** is all that is kept of rows: the weighted sums A = sum w z z' and b = sum w z u of least squares, and how far
rows were off lately. Sums add, so routers feed one estimate without overwriting each other, and a new router begins with
what was learned. Evidence fades exponentially with the requests after it (MEMORY). The estimate is

    factors = (A + P)^-1 (b + P prior)

where P makes the configured rates worth a fraction of a request, or the likeness of two rates (a worker that computes
twice as fast attends twice as fast). This is recursive least squares in information form with a prior and exponential
forgetting (Ljung and Soderstrom, Theory and Practice of Recursive Identification, 1983, chapter 2). A factor that would
leave its bounds is held there, and the others are solved again.

**Robust.** Rows are relative, z = term / expected, so that long requests do not drown short ones; never relative to less
than half of what was measured, so that a stall weighs little even where the estimate is still far too low. A row is weighed
down where it is off by more than HUBER times the usual error (Huber, Robust Estimation of a Location Parameter, 1964):
however late, it pulls no more than one that was slightly late. The usual error is learned too, of the last requests.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import mul
from typing import Final

from kvatlas.errors import InvalidValue


class Rate(IntEnum):
    """What is learned: its place in every vector here."""

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


class Kind(IntEnum):
    """What a row measures: the time to the first token, or from one token to the next."""

    FIRST = 0
    NEXT = 1


RATES: Final = len(Rate)
Vector = tuple[float, ...]

MEMORY: Final = 256.0
"""How many requests evidence is of, in effect; older ones fade."""
FIRST_MEMORY: Final = 32.0
"""The same at first. It grows with the requests, so that those that were judged while little was known fade soon."""
ERRORS_MEMORY: Final = 32.0
"""The same for the usual error, always: it has to follow while the estimate settles."""
PRIOR_WEIGHT: Final = 0.002
"""What the configured rates and likenesses weigh, in requests; more at first (`_prior_weight`)."""
HUBER: Final = 1.7
"""In mean absolute errors: 1.345 standard deviations of normal noise."""
FIRST_ERROR: Final = 0.5
"""The usual relative error before anything is known; worth FIRST_ERROR_ROWS rows."""
FIRST_ERROR_ROWS: Final = 4.0
LEAST_EXPECTED_US: Final = 1_000.0
LEAST_FACTOR: Final = 0.01
MOST_FACTOR: Final = 100.0
"""Bounds of a rate, in times of the configured one. What may be nothing (MAY_VANISH) has no lower bound but zero."""
MAY_VANISH: Final = frozenset({Rate.OVERHEAD, Rate.ATTENTION, Rate.TPOT_RUNNING, Rate.TPOT_KV})
LIKE: Final = {
    Rate.ATTENTION: Rate.PREFILL,
    Rate.OVERHEAD: Rate.TPOT_BASE,
    Rate.TPOT_RUNNING: Rate.TPOT_BASE,
    Rate.TPOT_KV: Rate.TPOT_BASE,
}
"""Without evidence of its own a rate differs from the configured one as much as this one does."""

FORM: Final = 1
"""Which rates and sums these are: what another version wrote is not read."""
ERRORS: Final = 2 * len(Kind)
_A_AT: Final = ERRORS + RATES
SUMS: Final = _A_AT + RATES * (RATES + 1) // 2
"""Numbers in a worker's evidence: errors and rows of each kind, then b, then A's lower triangle by rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of `us` microseconds, and what each rate's term would take at its unit."""

    kind: Kind
    us: float
    terms: Vector


@dataclass(frozen=True, slots=True)
class Evidence:
    """See the module. `requests`: how many it is of, faded ones too. `keep` and `errors_keep`: what they leave of older
    evidence: of its sums, and of the errors among them, which are the first ERRORS.

    Raises InvalidValue for another number of sums.
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
        """What the rows of one request say, judged by what was estimated before."""
        sums = [0.0] * SUMS
        for row in rows:
            expected = sum(map(mul, before.factors, row.terms))
            scale = max(expected, row.us / 2, LEAST_EXPECTED_US)
            off, usual = abs(row.us - expected) / scale, before.errors[row.kind]
            weight = HUBER * usual / off if off > HUBER * usual else 1.0
            sums[2 * row.kind] += min(off, 3 * usual)
            sums[2 * row.kind + 1] += 1.0
            given = [(i, term / scale) for i, term in enumerate(row.terms) if term]
            for i, z in given:
                sums[ERRORS + i] += weight * z * row.us / scale
                for j, other in given:
                    if j > i:
                        break
                    sums[_A_AT + i * (i + 1) // 2 + j] += weight * z * other
        memory = min(max(before.requests, FIRST_MEMORY), MEMORY)
        return cls(1, 1 - 1 / memory, 1 - 1 / ERRORS_MEMORY, tuple(sums))

    @classmethod
    def together(cls, every: Iterable["Evidence"]) -> "Evidence":
        """Of several workers, as if they were one."""
        listed = list(every)
        if not listed:
            return cls()
        return cls(
            sum(one.requests for one in listed), sums=tuple(map(sum, zip(*(one.sums for one in listed), strict=True)))
        )

    def then(self, newer: "Evidence") -> "Evidence":
        """Both. The store's twin of this line is `kvatlas/reservations/functions/learn.lua`."""
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
    """From so many requests: factors by `Rate`, and the usual relative error by `Kind`."""

    requests: int
    factors: Vector
    errors: Vector

    @classmethod
    def of(cls, evidence: Evidence, prior: Vector) -> "Estimate":
        """`prior`: the configured rates, in times of the units; one that is configured as 0 stays 0. 0.1 to 0.3 ms."""
        sums = evidence.sums
        errors = tuple(
            (sums[2 * kind] + FIRST_ERROR * FIRST_ERROR_ROWS) / (sums[2 * kind + 1] + FIRST_ERROR_ROWS) for kind in Kind
        )
        # solved in times of the configured rates: there the prior of each is 1
        a = [[0.0] * RATES for _ in Rate]
        at = _A_AT
        for i in range(RATES):
            for j in range(i + 1):
                a[i][j] = a[j][i] = sums[at] * prior[i] * prior[j]
                at += 1
        b = [total * scale for total, scale in zip(sums[ERRORS:_A_AT], prior, strict=True)]
        weight = _prior_weight(evidence.requests)
        for rate in Rate:
            a[rate][rate] += weight
            if (other := LIKE.get(rate)) is None:
                b[rate] += weight
            else:
                a[other][other] += weight
                a[rate][other] -= weight
                a[other][rate] -= weight
        found = _solve_within_bounds(a, b)
        return cls(evidence.requests, tuple(map(mul, found, prior)), errors)


def _prior_weight(requests: int) -> float:
    """An engine's first requests are its slowest (it compiles, it fills its pools): they don't make it look slow at once,
    or nobody would send it the ones that show how fast it is."""
    return PRIOR_WEIGHT + 1 / (1 + requests) ** 2


def _solve_within_bounds(a: list[list[float]], b: list[float]) -> Vector:
    """a x = b; an x outside of its bounds is held at the nearer one while the others are solved again."""
    x = [0.0] * RATES
    free = list(range(RATES))
    while free:
        rest = [b[i] - sum(a[i][j] * x[j] for j in range(RATES) if j not in free) for i in free]
        outside = False
        for i, value in zip(list(free), _solve([[a[i][j] for j in free] for i in free], rest), strict=True):
            x[i] = min(max(value, 0.0 if i in MAY_VANISH else LEAST_FACTOR), MOST_FACTOR)
            if x[i] != value:
                free.remove(i)
                outside = True
        if not outside:
            break
    return tuple(x)


def _solve(a: list[list[float]], b: list[float]) -> list[float]:
    """By Cholesky's decomposition: `a` is symmetric and, thanks to the prior, positive definite."""
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
