"""What a caller of an engine can measure of an answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median_low

MOST_GAPS = 512


@dataclass(frozen=True, slots=True)
class Timings:
    """Microseconds; None: not measured. `AnswerClock` measures them.

    `ttft_us`: from sending the request to its first token. `tpot_us`: from one token to the next as usual: the median,
    because the mean has the prefill of other requests in it.
    """

    ttft_us: float | None = None
    tpot_us: float | None = None


@dataclass(slots=True)
class AnswerClock:
    """Starts when the request is sent; call `part` for each part of a streamed answer when it is there."""

    now_ns: Callable[[], int] = time.perf_counter_ns
    _sent_ns: int = field(init=False)
    _first_ns: int | None = field(default=None, init=False)
    _last_ns: int = field(default=0, init=False)
    _gaps_ns: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._sent_ns = self.now_ns()

    def part(self) -> None:
        """One more part of the answer: a token or more."""
        now = self.now_ns()
        if self._first_ns is None:
            self._first_ns = now
        elif len(self._gaps_ns) < MOST_GAPS:
            self._gaps_ns.append(now - self._last_ns)
        self._last_ns = now

    def timings(self, output_tokens: int) -> Timings:
        """Of an answer with so many tokens that came in these parts.

        Parts of several tokens count by their mean, if that is less than the usual time between parts: an engine that
        makes several tokens at a time, and a network that joins parts, look alike.
        """
        if self._first_ns is None:
            return Timings()
        ttft_us = (self._first_ns - self._sent_ns) / 1_000
        if output_tokens < 2 or not self._gaps_ns:
            # one part of several tokens: when the first one was there is not known
            return Timings(ttft_us if output_tokens == 1 else None)
        mean_ns = (self._last_ns - self._first_ns) / (output_tokens - 1)
        return Timings(ttft_us, min(mean_ns, median_low(self._gaps_ns)) / 1_000)
