"""One router process's part of a client's requests or tokens per minute, drawn from the fleet's allowance ahead of use.

No I/O. The drawing is done by `AllowanceExchange`. While the store is down, it draws from `LocalAllowances`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.fleet_store.allowances import MINUTE_S, MOST_DEBT, Draw, Drawn

KEEP_S = 10.0
"""Drawn amounts that stay unused for this long are returned."""
FADE = 0.8
"""Factor by which the expected use is multiplied at each exchange."""
MOST_AHEAD = 0.1
"""Largest share of an allowance that one process draws ahead of use. Other processes may have to do without it for some
seconds."""


@dataclass(slots=True)
class Allowance:
    """`size`: the amount that refills in a minute. `drawn`: the amount left for use here; negative if overdrawn. `left`: what
    was left of the fleet's allowance when the store was last asked; None: it has never been asked. `waiting`: the amount for
    which requests are waiting."""

    name: str
    size: int
    drawn: int = 0
    left: int | None = None
    asked_s: float = 0.0
    waiting: int = 0
    _used: int = 0
    _used_s: float = 0.0
    _expected: float = 0.0

    def take(self, amount: int, now_s: float) -> bool:
        """Use this amount if it is available here. Returns whether it was."""
        if self.drawn < amount:
            return False
        self.drawn -= amount
        self._used += amount
        self._used_s = now_s
        return True

    def correct(self, amount: int) -> None:
        """Record that this much more was used than was taken (negative: less)."""
        self.drawn -= min(amount, MOST_DEBT * self.size)

    def remaining(self, now_s: float) -> int:
        """What is left of the fleet's allowance, as far as this process knows."""
        if self.left is None:
            return self.size
        refilled = int((now_s - self.asked_s) * self.size / MINUTE_S)
        return max(0, min(self.size, self.left + refilled + self.drawn))

    def wait_s(self, amount: int, now_s: float) -> float:
        """Seconds until this amount may be available; 0: it may be available now."""
        if self.left is None:
            return 0.0
        ready_s = self.asked_s + (min(amount, self.size) - self.left - self.drawn) * MINUTE_S / self.size
        return max(0.0, ready_s - now_s)

    def next_draw(self, now_s: float, *, ends: bool = False) -> Draw:
        """The amounts to put back and to draw. What is put back is removed immediately; what is drawn arrives through `add`.
        `ends`: no more requests will come."""
        self._expected = max(2.0 * self._used, self._expected * FADE)
        if ends or now_s - self._used_s >= KEEP_S:
            self._expected = 0.0
        self._used = 0
        ahead = min(int(self._expected), int(self.size * MOST_AHEAD)) + self.waiting
        back = min(self.drawn, 0) or max(0, self.drawn - ahead)
        self.drawn -= back
        return Draw(self.name, self.size, back, max(0, ahead - self.drawn))

    def add(self, drawn: Drawn, now_s: float) -> None:
        """Add what an exchange returned."""
        self.drawn += drawn.taken
        self.left = drawn.left
        self.asked_s = now_s

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to exchange."""
        return not (self.drawn or self.waiting or self._used)


class LocalAllowances:
    """The fleet's allowances as this process last saw them, refilled at the full rate. Each process counts on its
    own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, tuple[float, float]] = {}

    def see(self, name: str, left: float, now_s: float) -> None:
        """Record an allowance that the store reported."""
        self._known[name] = left, now_s
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]

    def draw(self, draws: Sequence[Draw], now_s: float) -> Sequence[Drawn]:
        """Draw as the store's function does."""
        return [self._draw(one, now_s) for one in draws]

    def _draw(self, one: Draw, now_s: float) -> Drawn:
        left, at_s = self._known.pop(one.name, (float(one.size), now_s))
        left = min(one.size, left + max(0.0, now_s - at_s) * one.size / MINUTE_S)
        left = max(-MOST_DEBT * one.size, min(one.size, left + one.back))
        taken = max(0, min(one.wanted, int(left)))
        self.see(one.name, left - taken, now_s)
        return Drawn(taken, int((left - taken) // 1))
