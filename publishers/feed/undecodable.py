"""Which payloads that can't be understood are the engine's own (pure).

Anybody may send to the feed's socket. A foreign message that took a seq would make the engine's own message of that seq
look like another life of the engine, and all that is held would be given up. So a payload that can't be understood is put
aside: what comes next tells whether its seq was the engine's.
"""

from collections.abc import Sequence

Batch = tuple[int, bytes]

MOST_ASIDE = 64


class PoisonAside:
    """Payloads put aside that would have been the next ones in order, by seq without a hole."""

    def __init__(self) -> None:
        self._aside: list[Batch] = []

    def put(self, seq: int, payload: bytes, last_seq: int | None) -> None:
        """A payload that can't be understood came. `last_seq`: the last that was taken, None for none."""
        next_seq = self._aside[-1][0] + 1 if self._aside else None
        if seq == next_seq:
            self._aside = [*self._aside, (seq, payload)][-MOST_ASIDE:]
        elif seq == (0 if last_seq is None else last_seq + 1):
            self._aside = [(seq, payload)]

    def before(self, seq: int) -> Sequence[Batch]:
        """A good message of this seq came: those put aside that lead up to it were the engine's, the others were not."""
        aside, self._aside = self._aside, []
        return [one for one in aside if one[0] < seq] if aside and aside[-1][0] >= seq - 1 else []
