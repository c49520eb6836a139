"""Exponential back-off between retries."""


class Backoff:
    """Pauses in seconds that double, from `first_s` up to `longest_s`. The caller sleeps, and resets this after a success."""

    __slots__ = ("_first_s", "_longest_s", "_next_s")

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The pause before the next attempt, in seconds."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Start with the first pause again."""
        self._next_s = self._first_s
