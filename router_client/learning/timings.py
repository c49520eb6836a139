"""Times of an engine's answer, measured by a caller."""

import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from statistics import median_low
from typing import Any, Protocol, Self

from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from router_client.learning.loop_lateness import LoopLateness

MOST_GAPS = 512
LEAST_GAPS = 2
MOST_TOKENS_A_PART = 16
"""Largest credible mean number of tokens per part. Engines with speculative decoding generate up to about 10 tokens at a
time."""
TOGETHER = 0.1
"""Parts that are closer together than this share of the mean gap arrived together: the network or the event loop held
back the first one."""
MOST_LATE = 0.1
"""Largest tolerated lateness of the loop, as a share of a measured time. Above that, the time says more about the loop
than about the engine. A few turns of the loop pass within a measured time, so the actual error may be a few times as
large."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in microseconds; None: not measured. `AnswerClock` measures them.

    `ttft_us`: from sending the request to its first token. `tpot_us`: the median time from one token to the next; the mean
    would include the prefill of other requests.
    """

    ttft_us: float | None = None
    tpot_us: float | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self | None:
        """The times in a JSON body, under `timings`. Raises InvalidValue for values that are not times."""
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


class Lateness(Protocol):
    """The lateness of whatever measures the times; implemented by `LoopLateness`."""

    def watch(self) -> object: ...

    def most_ns(self, start_ns: int, end_ns: int) -> int: ...


@dataclass(slots=True, eq=False)
class AnswerClock:
    """Starts when the request is sent; call `part` as each part of a streamed answer arrives.

    `lateness`: by default, that of the running event loop; `now_ns` must then use the same clock.
    """

    now_ns: Callable[[], int] = time.perf_counter_ns
    lateness: Lateness | None = None
    _sent_ns: int = field(init=False)
    _first_ns: int | None = field(default=None, init=False)
    _last_ns: int = field(default=0, init=False)
    _parts: int = field(default=0, init=False)
    _parts_after_first: int = field(default=0, init=False)
    _gaps: list[tuple[int, int]] = field(default_factory=list, init=False)
    _held_ns: int = field(default=0, init=False)
    _watch: object = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._sent_ns = self.now_ns()
        if self.lateness is None and self.now_ns is time.perf_counter_ns:
            self.lateness = LoopLateness.of_running_loop()
        if self.lateness is not None:
            self._watch = self.lateness.watch()

    def part(self, parts: int = 1) -> None:
        """Record that one or more parts of the answer arrived, each of one or more tokens. Don't count parts that carry only
        a role, a token count or the end: otherwise an answer of a few tokens would look many times faster than it is."""
        if parts < 1:
            return
        now = self.now_ns()
        self._parts += parts
        if self._first_ns is None:
            self._first_ns = now
        else:
            self._parts_after_first += parts
            if len(self._gaps) < MOST_GAPS:
                self._gaps.append((now - self._last_ns, parts))
        self._last_ns = now

    def hold(self, ns: int) -> None:
        """Record how long the answer's receiver accepted nothing: the engine, or parts of its answer, may have had to wait."""
        self._held_ns += ns

    @property
    def ttft_us(self) -> float | None:
        """Time from the request to the first part of its answer, as seen here."""
        return None if self._first_ns is None else (self._first_ns - self._sent_ns) / 1_000

    def first_part(self) -> Timings:
        """The time to the first part alone, unless the event loop was too late to measure it."""
        measured = self._first_ns is not None and self._is_measured(self._sent_ns, self._first_ns)
        return Timings(self.ttft_us if measured else None)

    def timings(self, output_tokens: int) -> Timings:
        """The times of an answer of `output_tokens` tokens that arrived in the recorded parts.

        The time from token to token is the median over the parts, divided by the tokens per part. It is missing if there are
        fewer than LEAST_GAPS gaps, or if parts have more tokens than an engine generates at a time, because their number is
        then not credible. Times that the event loop was too late to measure, or that the answer's receiver prolonged, are
        left out.
        """
        if self._first_ns is None or output_tokens < 2 or not self._gaps:
            # one part of several tokens: when the first of them was generated is unknown
            return self.first_part() if output_tokens == 1 else Timings()
        tokens_a_part = 1.0
        if output_tokens - 1 > self._parts:  # the last token often has neither text nor a part
            tokens_a_part = (output_tokens - 1) / self._parts_after_first
        each_ns = [gap_ns / parts for gap_ns, parts in self._join_gaps()]
        first = self.first_part()
        if len(each_ns) < LEAST_GAPS or tokens_a_part > MOST_TOKENS_A_PART:
            return first
        if not self._is_measured(self._first_ns, self._last_ns):
            return first
        if self._held_ns > MOST_LATE * (self._last_ns - self._first_ns):
            return first
        return replace(first, tpot_us=median_low(each_ns) / tokens_a_part / 1_000)

    def _is_measured(self, start_ns: int, end_ns: int) -> bool:
        """True if the event loop was on time between these times."""
        return self.lateness is None or self.lateness.most_ns(start_ns, end_ns) <= MOST_LATE * (end_ns - start_ns)

    def _join_gaps(self) -> list[tuple[int, int]]:
        """The gaps between parts, each with the number of parts that ended it. Parts that arrived together, though in two
        reads, count as one arrival."""
        assert self._first_ns is not None
        least_ns = TOGETHER * (self._last_ns - self._first_ns) / self._parts_after_first
        joined: list[tuple[int, int]] = []
        for gap_ns, parts in self._gaps:
            if gap_ns >= least_ns:
                joined.append((gap_ns, parts))
            elif joined:  # otherwise they came with the first part
                joined[-1] = joined[-1][0] + gap_ns, joined[-1][1] + parts
        return joined
