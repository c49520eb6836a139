"""Judges whether one engine is alive. Pure: takes observations and returns a state.

    ALIVE      it makes progress, or has no work.
    SUSPECTED  it has work but made no progress for `suspect_s`: it is probed, and still gets requests.
    STALLED    it made no progress for `stall_s`, not even on the probe: it gets no requests, and those without a byte may move.
    PROBING    it is stalled, and being probed.

Progress is a computed byte of any answer, including a probe's, a change in the engine's counters, or a KV event (`observe`).
Any progress makes an engine alive, whatever its state and however long one request has been waiting there. Status pages and
refusals don't count as progress.

- **Allowed silence** (`Bounds`, from predicted times: `expected_times.py`). Silence begins with the last progress, or with the
  first request if the engine was idle. The bounds are the longest ones among the requests that were present then or arrived
  before it could be suspected. Later requests, which keep coming until the stall is found, don't extend it. If all running
  answers have begun, BEGUN applies.
- **Clients that disconnected** before the first byte are evidence that the engine had work. LEAST_LEFT of them since the last
  progress make it suspected, which only costs a probe. They alone never make it stalled: if no request is waiting, it becomes
  stalled only when a probe stays unanswered for twice the usual time.
- **A probe** may take as long as the time between suspicion and stall, counted from when it was sent. While an engine is
  stalled, one probe runs at a time, and probes are PROBE_EVERY_S apart.
- **An engine that can't be probed**, because it refuses the probe itself, becomes stalled only through a waiting request. It is
  then tried with one real request every TRIAL_EVERY_S.
- **A pause of the observer** (`skip`) does not count as silence.
- Once an engine has been stalled for CUT_S, its other answers are abandoned too (`is_lost`).
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvatlas_router.progress.expected_times import Bounds

BEGUN = Bounds(5.0, 10.0)
LEAST_LEFT = 3
LEFT_S = 60.0
"""Clients that disconnected are forgotten if no other request comes for this long."""
PROBE_EVERY_S = 2.0
PROBE_S = 15.0
"""Minimum time for which a probe of a stalled engine runs before the next one replaces it."""
TRIAL_EVERY_S = 10.0
CUT_S = 120.0


class State(StrEnum):
    ALIVE = "alive"
    SUSPECTED = "suspected"
    STALLED = "stalled"
    PROBING = "probing"


class Probe(StrEnum):
    """The outcome of a probe. `UNFIT`: the engine refused the request itself, which proves nothing."""

    ANSWERED = "answered"
    FAILED = "failed"
    UNFIT = "unfit"


@dataclass(slots=True)
class _Waiting:
    """A request at the engine whose answer has not begun."""

    sent: float
    bounds: Bounds


@dataclass(slots=True)
class _Deadlines:
    """The times at which the engine counts as suspected, then as stalled. Requests that arrive by `closes_at` can
    extend both."""

    closes_at: float
    suspect_at: float
    stall_at: float

    @classmethod
    def of(cls, bounds: Bounds, at: float) -> "_Deadlines":
        return cls(at + bounds.suspect_s, at + bounds.suspect_s, at + bounds.stall_s)

    def add(self, bounds: Bounds, at: float) -> None:
        if at <= self.closes_at:
            self.suspect_at = max(self.suspect_at, at + bounds.suspect_s)
            self.stall_at = max(self.stall_at, at + bounds.stall_s)


class EngineProgress:
    """Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.state = State.ALIVE
        self.stalled_at: float | None = None
        """When it became stalled; None if it is not."""
        self.may_be_probed = True
        self._waiting: dict[Hashable, _Waiting] = {}
        self._begun: set[Hashable] = set()
        """Requests whose answers have begun. Thousands may be open, so nothing iterates over all of them."""
        self._left, self._left_at = 0, 0.0
        self._quiet_since: float | None = None
        """When the silence began; None if it has no work."""
        self._deadlines: _Deadlines | None = None
        """Set by `_find_deadlines` when they are needed but unknown, because each part of an answer changes them."""
        self._knows_deadlines = True
        self._doubted_at: float | None = None
        """When the first probe since the last progress was sent."""
        self._probe_at: float | None = None
        """When the current probe was sent."""
        self._next_probe_at = 0.0
        self._trial: Hashable | None = None
        self._trial_at = 0.0

    # ------------------------------------------------------------ evidence

    def send(self, key: Hashable, bounds: Bounds, now: float) -> None:
        """Record that a request is being sent to the engine."""
        if self._quiet_since is None:
            self._quiet_since = now
        if self.is_stalled and self._trial is None:
            self._trial = key
        self._deadlines = _extend(self._find_deadlines(), bounds, now)
        self._waiting[key] = _Waiting(now, bounds)

    def receive(self, key: Hashable, now: float) -> float | None:
        """Record a computed byte of a request's answer. If it is the first one, returns the seconds that it took."""
        first = self._waiting.pop(key, None)
        if first is not None:
            self._begun.add(key)
        self._progress(now)
        return None if first is None else now - first.sent

    def end(self, key: Hashable, now: float) -> None:
        """Record that a request is over: answered, refused, or sent elsewhere."""
        self._begun.discard(key)
        if key in self._waiting:
            self._find_deadlines()  # the request counts until the next progress
            del self._waiting[key]
        if key == self._trial:
            self._trial, self._trial_at = None, now + TRIAL_EVERY_S
        self._rest_if_idle()

    def renew(self, bounds: Mapping[Hashable, Bounds]) -> None:
        """Replace the bounds of these requests, because more is now known about their times."""
        for key, waiting in self._waiting.items():
            waiting.bounds = bounds.get(key, waiting.bounds)
        self._deadlines, self._knows_deadlines = None, False

    def leave(self, key: Hashable, now: float) -> None:
        """Record that a request's client disconnected."""
        if key in self._waiting:
            self._left, self._left_at = self._left + 1, now
        self.end(key, now)

    def observe(self, at: float, now: float) -> None:
        """Record that the engine's counters or KV events changed at time `at`."""
        if self._quiet_since is not None and at > self._quiet_since:
            self._progress(min(at, now))

    def skip(self, seconds: float, now: float) -> None:
        """Discount a period in which the observer did not look."""
        deadlines = self._find_deadlines()
        if self._quiet_since is not None:
            self._quiet_since = min(now, self._quiet_since + seconds)
        if self._doubted_at is not None:
            self._doubted_at = min(now, self._doubted_at + seconds)
        if deadlines is not None:
            deadlines.closes_at, deadlines.suspect_at = deadlines.closes_at + seconds, deadlines.suspect_at + seconds
            deadlines.stall_at += seconds
        for waiting in self._waiting.values():
            waiting.sent = min(now, waiting.sent + seconds)

    def send_probe(self, now: float) -> None:
        """Record that a probe is being sent."""
        self._probe_at = now
        if self._doubted_at is None:
            self._doubted_at = now
        self._next_probe_at = now + PROBE_EVERY_S
        if self.state is State.STALLED:
            self.state = State.PROBING

    def end_probe(self, outcome: Probe, now: float) -> None:
        """Record a probe's outcome. A failed probe may be sent again."""
        if outcome is Probe.ANSWERED:
            self._progress(now)
            return
        if outcome is Probe.UNFIT:
            self.may_be_probed = False
        self._probe_at = None
        self._next_probe_at = now + PROBE_EVERY_S
        if self.state is State.PROBING:
            self.state = State.STALLED

    # ------------------------------------------------------------ judgement

    def judge(self, now: float) -> State:
        """Update and return the state."""
        if not self._has_work and self._left and now - self._left_at > LEFT_S:
            self._left = 0
            self._rest_if_idle()
        if self.is_stalled or self._quiet_since is None:
            return self.state
        suspect_at, stall_at = self._suspect_and_stall()
        if now < suspect_at or not (self._has_work or self._left >= LEAST_LEFT):
            return self.state
        self.state = State.SUSPECTED
        if now >= stall_at and self._is_sure(stall_at - suspect_at, now):
            self.state, self.stalled_at = State.STALLED, now
            self._probe_at, self._next_probe_at = None, now
            self._trial_at = now + TRIAL_EVERY_S
        return self.state

    def wants_probe(self, now: float) -> bool:
        """True if the engine should be probed now. The new probe replaces any that is still running."""
        if self.state is State.ALIVE or now < self._next_probe_at:
            return False
        if self._probe_at is None:
            return self.may_be_probed
        return self.is_stalled and now - self._probe_at >= PROBE_S

    @property
    def is_stalled(self) -> bool:
        return self.stalled_at is not None

    def refuses(self, now: float) -> bool:
        """True if the engine should get no requests now."""
        if not self.is_stalled:
            return False
        return self.may_be_probed or self._trial is not None or now < self._trial_at

    def is_lost(self, now: float) -> bool:
        """True if the engine has been stalled for so long that its requests will never be answered."""
        return self.stalled_at is not None and now - self.stalled_at >= CUT_S

    def quiet_s(self, now: float) -> float:
        """Seconds during which the engine has made no progress although it has work."""
        return 0.0 if self._quiet_since is None else max(0.0, now - self._quiet_since)

    # ------------------------------------------------------------ pieces

    def _progress(self, at: float) -> None:
        self.state, self.stalled_at, self.may_be_probed = State.ALIVE, None, True
        self._left, self._trial = 0, None
        self._deadlines, self._knows_deadlines = None, False
        self._doubted_at, self._probe_at, self._next_probe_at = None, None, 0.0
        self._quiet_since = at if self._has_work else None

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting or self._begun)

    def _find_deadlines(self) -> _Deadlines | None:
        """The deadlines that follow from the requests waiting for their first byte; None if there are none."""
        if not self._knows_deadlines:
            self._knows_deadlines = True
            for waiting in self._waiting.values():
                at = max(self._quiet_since or waiting.sent, waiting.sent)
                self._deadlines = _extend(self._deadlines, waiting.bounds, at)
        return self._deadlines

    def _rest_if_idle(self) -> None:
        """Return to ALIVE if no work is left, since silence then proves nothing."""
        if not self._has_work and not self._left and not self.is_stalled:
            self._quiet_since = self._deadlines = self._doubted_at = self._probe_at = None
            self._knows_deadlines = True
            self.state = State.ALIVE

    def _suspect_and_stall(self) -> tuple[float, float]:
        """The times at which the engine counts as suspected, then as stalled, unless it makes progress first."""
        if (deadlines := self._find_deadlines()) is not None:
            return deadlines.suspect_at, deadlines.stall_at
        assert self._quiet_since is not None
        return self._quiet_since + BEGUN.suspect_s, self._quiet_since + BEGUN.stall_s

    def _is_sure(self, seconds: float, now: float) -> bool:
        """True if probes have stayed unanswered for this long or, for an engine that can't be probed, if a request has
        waited for longer than its own bound."""
        if self.may_be_probed:
            seconds = seconds if self._has_work else 2 * seconds
            return self._doubted_at is not None and now - self._doubted_at >= seconds
        since = self._quiet_since or 0.0
        return any(now >= max(since, one.sent) + one.bounds.stall_s for one in self._waiting.values())


def _extend(deadlines: _Deadlines | None, bounds: Bounds, at: float) -> _Deadlines:
    """The deadlines after one more request is taken into account."""
    if deadlines is None:
        return _Deadlines.of(bounds, at)
    deadlines.add(bounds, at)
    return deadlines
