"""What to do when the engine may have taken blocks away and nobody could read it (pure; times are the caller's seconds).

A payload that can't be understood, or an event of a kind that nobody knows, may have been a removal. To claim less is safe, to
claim a block that is gone is not. Where the operator wants that strictly (`--distrust-poison`), what was held is given up, and
told anew from nothing. By default it is not: one bad payload would cost all that a worker holds, and an engine that tells a
new kind of event would hardly be counted on. Each time costs the index a new incarnation, so it is rationed: an engine that
goes on like that is not listened to for a while, and claims nothing.
"""

BURST = 8
"""So often at once: a few bad payloads in a long replay cost what was stored before the last of them, no more."""
RATION_S = 15.0
"""One more after each."""


class Mistrust:
    """`lost` when something could not be read; a batch is only taken while `listening`."""

    def __init__(self, burst: int = BURST, ration_s: float = RATION_S) -> None:
        self._burst = burst
        self._ration_s = ration_s
        self._left = float(burst)
        self._at_s: float | None = None
        self._deaf = False

    def lost(self, now_s: float) -> bool:
        """Something that could not be read may have taken blocks away. Is what is held to be given up? Not while deaf:
        nothing is held then."""
        if not self.listening(now_s):
            return False
        self._left -= 1.0
        self._deaf = self._left < 1.0
        return True

    def listening(self, now_s: float) -> bool:
        """May what the engine says be taken now?"""
        if self._at_s is not None:
            self._left = min(float(self._burst), self._left + max(0.0, now_s - self._at_s) / self._ration_s)
        self._at_s = now_s
        if self._left >= 1.0:
            self._deaf = False
        return not self._deaf
