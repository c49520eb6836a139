"""The working set of a pool: the number of prefix tokens that its prompts keep coming back to, as seen by one router.

It is compared with what the caches can hold (`Fetches.displaced_share`): as long as it fits several times over, one more
copy displaces nothing that would be missed. A step (STEP_BLOCKS blocks) belongs to the working set if it was part of two
prompts, the last of them at most KEPT_S ago. Only steps with certain hashes are tracked (the more steps there are, the
fewer), so that memory is bounded (C. Waldspurger et al.: Efficient MRC construction with SHARDS, FAST 2015).
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from kvatlas.blocks.hashing import thin
from kvatlas.reservations import STEP_BLOCKS

KEPT_S = 120.0
LEARNED_S = 10.0
"""Until this much time has passed, the size is unknown."""
MOST_FOLLOWED = 16_384
_MIX = 0x9E3779B97F4A7C15


class WorkingSet:
    """The working set of one pool. `clock`: returns seconds of a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._steps: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """Followed steps, least recently seen first: when last seen, and their tokens if seen more than once, else 0."""
        self._every = 1
        self._counted_tokens = 0

    def record(self, chain: bytes, block_tokens: int) -> None:
        """Record a prompt. `chain`: its packed sequence hashes."""
        now, tokens = self._clock(), block_tokens * STEP_BLOCKS
        self._forget(now)
        for step in memoryview(thin(chain, STEP_BLOCKS)).cast("Q"):
            if not self._is_followed(step):
                continue
            known = self._steps.pop(step, None)
            again = 0 if known is None else tokens
            self._steps[step] = now, again
            self._counted_tokens += again - (0 if known is None else known[1])
        while len(self._steps) > MOST_FOLLOWED:
            self._follow_fewer()

    def tokens(self) -> int | None:
        """Return the current size of the working set; None if it is not known yet."""
        now = self._clock()
        if now - self._began_s < LEARNED_S:
            return None
        self._forget(now)
        return self._counted_tokens * self._every

    def _is_followed(self, step: int) -> bool:
        return self._every == 1 or (step * _MIX >> 32) % self._every == 0

    def _follow_fewer(self) -> None:
        self._every *= 2
        for step in [step for step in self._steps if not self._is_followed(step)]:
            self._counted_tokens -= self._steps.pop(step)[1]

    def _forget(self, now: float) -> None:
        while self._steps:
            step, (seen, tokens) = next(iter(self._steps.items()))
            if now - seen <= KEPT_S:
                return
            del self._steps[step]
            self._counted_tokens -= tokens
