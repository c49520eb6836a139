"""Keeps one sender's flood from starving all others: messages above a sender's share are dropped before they are read."""

from collections.abc import Hashable

BURST = 20
PER_S = 10.0
"""Publishers send one heartbeat per second, and request a grant at most ten times per second."""
MOST_SENDERS = 10_000


class FairShare:
    """Admits the first `burst` messages from each sender, then `per_s` on average. Pure; times are in seconds of a monotonic
    clock."""

    def __init__(self, burst: int = BURST, per_s: float = PER_S) -> None:
        self._burst, self._per_s = burst, per_s
        self._taken: dict[Hashable, tuple[float, float]] = {}
        """How much of its burst each sender has used up, and as of when."""

    def admit(self, sender: Hashable, now_s: float) -> bool:
        """True if this message may be read."""
        taken = self._taken_of(sender, now_s)
        if taken > self._burst - 1:
            return False
        if len(self._taken) >= MOST_SENDERS and sender not in self._taken:
            self._forget_idle(now_s)
        self._taken[sender] = taken + 1, now_s
        return True

    def _taken_of(self, sender: Hashable, now_s: float) -> float:
        taken, at_s = self._taken.get(sender, (0.0, now_s))
        return max(0.0, taken - (now_s - at_s) * self._per_s)

    def _forget_idle(self, now_s: float) -> None:
        self._taken = {sender: one for sender, one in self._taken.items() if self._taken_of(sender, now_s)}
        if len(self._taken) >= MOST_SENDERS:
            self._taken.clear()
