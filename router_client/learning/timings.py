"""Times that a caller measures of an engine's answer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Self

from kvatlas.errors import InvalidValue

MOST_GAPS = 512


@dataclass(frozen=True, slots=True)
class Timings:
    """Microseconds; None: not measured. `AnswerClock` measures them.

    `ttft_us`: from sending the request to its first token. `tpot_us`: from one token to the next: the median, because the
    mean includes the prefill of other requests.
    """

    ttft_us: float | None = None
    tpot_us: float | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self | None:
        """Those that a JSON body has under `timings`. Raises InvalidValue for values that are not times."""
        timings = body.get("timings")
        if timings is None:
            return None
        if not isinstance(timings, Mapping):
            raise InvalidValue(f"timings is {timings!r:.80}; expected an object with ttft_us and tpot_us")
        found = []
        for name in ("ttft_us", "tpot_us"):
            us = timings.get(name)
            if us is not None and (isinstance(us, bool) or not isinstance(us, (int, float))):
                raise InvalidValue(f"timings.{name} is {us!r:.80}; expected microseconds")
            found.append(us)
        return cls(*found)


@dataclass(slots=True)
class AnswerClock:
    """Starts when the request is sent; call `part` as each part of a streamed answer arrives."""

    now_ns: Callable[[], int] = time.perf_counter_ns
    _sent_ns: int = field(init=False)
    _first_ns: int | None = field(default=None, init=False)
    _last_ns: int = field(default=0, init=False)
    _gaps_ns: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._sent_ns = self.now_ns()

    def part(self) -> None:
        """One more part of the answer arrived: a token or more."""
        now = self.now_ns()
        if self._first_ns is None:
            self._first_ns = now
        elif len(self._gaps_ns) < MOST_GAPS:
            self._gaps_ns.append(now - self._last_ns)
        self._last_ns = now

    @property
    def ttft_us(self) -> float | None:
        """From the request to its first part."""
        return None if self._first_ns is None else (self._first_ns - self._sent_ns) / 1_000

    def timings(self, output_tokens: int) -> Timings:
        """The times of an answer of `output_tokens` that came in these parts.

        Parts of several tokens count with their mean, if that is less than the median time between parts: an engine that
        makes several tokens at a time, and a network that joins parts, look alike.
        """
        if self._first_ns is None or output_tokens < 2 or not self._gaps_ns:
            # one part of several tokens: when the first of them was there is unknown
            return Timings(self.ttft_us if output_tokens == 1 else None)
        mean_ns = (self._last_ns - self._first_ns) / (output_tokens - 1)
        return Timings(self.ttft_us, min(mean_ns, median_low(self._gaps_ns)) / 1_000)
