"""Judges how much of an engine's feed can be published and, if that is almost nothing, why (pure; times are in seconds on
the caller's clock).

    at most a tenth of the reported blocks can be published               the most frequent reason, its share, its cure
    the engine serves requests, no events arrive, nothing is published    the engine's settings
    the feed repeatedly has holes                                         the replay socket

The verdict covers the last one to two periods with events. Older periods don't count, and an idle engine keeps its verdict.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

LEAST_TOLD = 8
"""Minimum number of reported blocks and events for a verdict."""
LEFT_OUT_SHARE = 0.9
PERIOD_S = 60.0
HOLES = 3
HOLES_S = 600.0
"""The feed counts as having holes if replay has left HOLES of them unfilled within this time. Each one dropped all
known blocks."""
SERVING_S = 10.0
SERVED_TOKENS = 1_024
"""An engine that has run requests for SERVING_S, or has read this many prompt tokens, must have stored a block."""


class Reason(StrEnum):
    """Why reported blocks are left out."""

    UNKNOWN_PARENT = "unknown_parent"
    ZERO_PARENT = "zero_parent"
    OTHER_BLOCK_SIZE = "other_block_size"
    UNINDEXABLE = "unindexable"
    NO_TOKENS = "no_tokens"
    ADAPTER_UNNAMED = "adapter_unnamed"
    REMOVAL_UNTOLD = "removal_untold"
    NO_FULL_ATTENTION = "no_full_attention"
    UNREADABLE_EVENTS = "unreadable_events"
    UNREADABLE_PAYLOADS = "unreadable_payloads"
    IGNORED = "ignored"
    NO_EVENTS = "no_events"
    HOLES = "holes"


@dataclass(frozen=True, slots=True)
class Taken:
    """Counts since the publisher's start. `told`: reported blocks of full attention, plus one for each event or batch left out
    as a whole; `left_out`: how many of those were left out, by reason. `unfilled`: holes that replay did not fill."""

    told: int = 0
    left_out: Mapping[Reason, int] | None = None
    unfilled: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine's work according to its metrics. `prompt_tokens`: the total since the engine's start."""

    running: bool = False
    prompt_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason=None`: nothing is wrong. `left_out`: blocks left out for any reason; `of_reason`: blocks left out for this
    reason."""

    reason: Reason | None = None
    told: int = 0
    left_out: int = 0
    of_reason: int = 0

    @property
    def share(self) -> float:
        """The share of reported blocks that was left out, 0 to 1; 1 if the engine serves requests but reports nothing."""
        if self.reason is Reason.NO_EVENTS:
            return 1.0
        return self.left_out / self.told if self.told else 0.0


class Intake:
    """Judges one worker; give it the counts about once a second."""

    def __init__(self) -> None:
        self._periods: deque[tuple[float, Taken]] = deque(maxlen=2)
        self._told = 0
        self._served_s = 0.0
        self._served_from: float | None = None
        self._looked_s: float | None = None
        self._unfilled = 0
        self._holes_s: deque[float] = deque(maxlen=HOLES)
        self.verdict = Verdict()

    def judge(self, taken: Taken, serving: Serving, *, publishes: bool, now_s: float) -> Verdict:
        """`publishes`: True if any block is published now."""
        if not self._periods:
            self._periods.append((now_s, Taken()))
        since_s, _ = self._periods[-1]
        _, before = self._periods[0]
        told = taken.told - before.told
        left_out = {
            reason: more
            for reason, count in (taken.left_out or {}).items()
            if (more := count - (before.left_out or {}).get(reason, 0)) > 0
        }
        if now_s - since_s >= PERIOD_S and taken.told - self._periods[-1][1].told >= LEAST_TOLD:
            self._periods.append((now_s, taken))
        silent = self._is_silent(taken, serving, publishes=publishes, now_s=now_s)
        holes = self._has_holes(taken.unfilled, now_s)
        total = sum(left_out.values())
        if told >= LEAST_TOLD and total >= LEFT_OUT_SHARE * told:
            reason = max(left_out, key=lambda one: left_out[one])
            self.verdict = Verdict(reason, told, total, left_out[reason])
        elif silent:
            self.verdict = Verdict(Reason.NO_EVENTS)
        elif holes:
            self.verdict = Verdict(Reason.HOLES, told, total, len(self._holes_s))
        else:
            self.verdict = Verdict(None, told, total)
        return self.verdict

    def _is_silent(self, taken: Taken, serving: Serving, *, publishes: bool, now_s: float) -> bool:
        """True if the engine serves requests, but reports nothing and nothing is published."""
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if publishes or taken.told != self._told or self._served_from is None:
            self._told, self._served_s, self._served_from = taken.told, 0.0, serving.prompt_tokens
            return False
        self._served_from = min(self._served_from, serving.prompt_tokens)  # the count restarts with the engine
        self._served_s += passed_s if serving.running else 0.0
        return self._served_s >= SERVING_S or serving.prompt_tokens - self._served_from >= SERVED_TOKENS

    def _has_holes(self, unfilled: int, now_s: float) -> bool:
        self._holes_s.extend([now_s] * (unfilled - self._unfilled))
        self._unfilled = unfilled
        return len(self._holes_s) == HOLES and now_s - self._holes_s[0] <= HOLES_S
