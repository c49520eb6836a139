"""How much counters have grown in the last minute. Counters since the start never fall, so they would show a single fault
forever."""

from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic

WINDOW_S = 60.0
STEP_S = 2.0


class RecentCounts:
    """Call `grown` regularly. A name that appears later is counted from 0."""

    def __init__(self, window_s: float = WINDOW_S, clock: Callable[[], float] = monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._kept: deque[tuple[float, Mapping[str, int]]] = deque([(clock(), {})])

    def grown(self, counts: Mapping[str, int]) -> dict[str, int]:
        """How much each counter has grown within the window, as far as it was read."""
        now = self._clock()
        while len(self._kept) > 1 and self._kept[1][0] <= now - self._window_s:
            self._kept.popleft()
        before = self._kept[0][1]
        if now - self._kept[-1][0] >= STEP_S / 2:
            self._kept.append((now, dict(counts)))
        return {name: value - before.get(name, 0) for name, value in counts.items()}
