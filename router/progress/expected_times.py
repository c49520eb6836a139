"""Decides how long an engine may be silent. Pure: takes predicted and measured times to the first byte and returns bounds.

A prediction is the cost profile's time to the first token, computed from the booked backlog and the learned rates. For an
answer that comes in one piece, it is the time for the whole answer. The ratio of measured to predicted times is learned for
each kind of request in a pool, over about MEMORY answers. The middle of this ratio corrects the prediction; its spread (the
standard deviation of its logarithm) sets the bounds.

    expected = prediction × middle
    suspect  = expected × e^(2 spread), at most 1.5 × expected; at least LEAST_SUSPECT_S
    stall    = 2 × suspect: at most 3 × expected, if that is 2 s or more; at least 1.5 × the longest silence of up to
               MOST_QUIET_S that ended with progress in the last few minutes

Until there are ENOUGH answers, nothing is known: stall = UNKNOWN_S, or 3 × the prediction if that is longer.
"""

import math
from dataclasses import field

from kvatlas.dataclass import dataclass

MEMORY = 64
ENOUGH = 12
LEAST_SUSPECT_S = 1.0
UNKNOWN_S = 30.0
SPREADS = 2.0
MOST_FACTOR = 1.5
SURE = 2.0
"""A stall is certain after this multiple of the time until suspicion."""
MOST_QUIET_S = 10.0
QUIET_HALF_LIFE_S = 300.0
PREDICTION_S = 0.01, 600.0
"""The bounds to which predictions are clamped."""
UNPREDICTED_S = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds without progress after which an engine is suspected, and after which it is stalled."""

    suspect_s: float
    stall_s: float


UNKNOWN = Bounds(UNKNOWN_S / SURE, UNKNOWN_S)


@dataclass(slots=True)
class _Ratio:
    """The middle and variance of the logarithm of the ratio of measured to predicted times."""

    answers: int = 0
    middle: float = 0.0
    variance: float = 0.0

    def add(self, value: float) -> None:
        self.answers += 1
        share = 1 / min(self.answers, MEMORY)
        off = value - self.middle
        self.middle += share * off
        self.variance = (1 - share) * (self.variance + share * off * off)


@dataclass(slots=True)
class ExpectedTimes:
    """One pool's times by kind of request. Times are seconds of any monotonic clock."""

    _ratios: dict[str, _Ratio] = field(default_factory=dict)
    _longest_s: float = 0.0
    _longest_at: float = 0.0

    def add(self, kind: str, predicted_s: float | None, measured_s: float) -> bool:
        """Record the time to an answer's first byte. True if the kind's times are known from now on."""
        ratio = self._ratios.get(kind)
        if ratio is None:
            ratio = self._ratios[kind] = _Ratio()
        ratio.add(math.log(max(measured_s, 1e-4) / _bounded(predicted_s)))
        return ratio.answers == ENOUGH

    def add_silence(self, seconds: float, now: float) -> None:
        """Record how long an engine that had work was silent before it made progress."""
        # a shorter silence changes no bound, since none is below SURE × LEAST_SUSPECT_S
        if LEAST_SUSPECT_S <= seconds <= MOST_QUIET_S and seconds >= self._longest(now):
            self._longest_s, self._longest_at = seconds, now

    def bounds(self, kind: str, predicted_s: float | None, now: float) -> Bounds:
        """Bounds on an engine's silence while it has a request of this kind to answer."""
        predicted_s = _bounded(predicted_s)
        ratio = self._ratios.get(kind)
        if ratio is None or ratio.answers < ENOUGH:
            stall_s = max(UNKNOWN_S, SURE * MOST_FACTOR * predicted_s)
            return Bounds(stall_s / SURE, stall_s)
        expected_s = predicted_s * math.exp(min(ratio.middle, 50.0))
        factor = min(MOST_FACTOR, math.exp(SPREADS * math.sqrt(ratio.variance)))
        suspect_s = max(LEAST_SUSPECT_S, expected_s * factor)
        return Bounds(suspect_s, max(SURE * suspect_s, 1.5 * self._longest(now)))

    def _longest(self, now: float) -> float:
        return self._longest_s * math.exp2(-max(0.0, now - self._longest_at) / QUIET_HALF_LIFE_S)


def _bounded(predicted_s: float | None) -> float:
    least, most = PREDICTION_S
    return min(most, max(least, UNPREDICTED_S if predicted_s is None else predicted_s))
