"""Fetches of KV between engines, as one router sees them: how much arrived.

An answer with fewer cached tokens than predicted did not fetch everything: its source died or had evicted the blocks, or the
engines can't reach each other at all. The share that arrived is what later fetches of the pool are priced with. It recovers
with time, so that a pool whose network was repaired is tried again.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvatlas.request import SelectionResult
from router_client.learning.usage import Usage

FADING = 0.95
"""Factor by which a fetch's weight shrinks with each later one: about the last twenty matter."""
PRIOR_FETCHES = 0.5
"""Initial evidence of a pool: as if this many fetches had arrived whole."""
RECOVERS_S = 60.0
"""Seconds in which all evidence loses two thirds of its weight."""


@dataclass(slots=True)
class _Arrived:
    asked: float = 0.0
    arrived: float = 0.0
    at_s: float = 0.0

    def fade(self, now_s: float) -> None:
        kept = math.exp(-max(0.0, now_s - self.at_s) / RECOVERS_S)
        self.asked, self.arrived, self.at_s = self.asked * kept, self.arrived * kept, now_s

    def share(self, now_s: float) -> float:
        self.fade(now_s)
        return (PRIOR_FETCHES + self.arrived) / (PRIOR_FETCHES + self.asked)


class Fetches:
    """See `FetchKnowledge`. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[str, _Arrived] = {}

    def share(self, pool_id: str) -> float:
        """Share of the requested tokens that recent fetches delivered, 0 to 1."""
        known = self._pools.get(pool_id)
        return 1.0 if known is None else known.share(self._clock())

    def record(self, pool_id: str, result: SelectionResult, usage: Usage) -> None:
        """Learn from an answer. Ignored if it was to fetch nothing, or reports no cached tokens."""
        asked, cached = result.transferred_tokens, usage.cached_tokens
        if not asked or result.reads_store or cached is None:
            return
        known = self._pools.setdefault(pool_id, _Arrived(at_s=self._clock()))
        known.fade(self._clock())
        arrived = min(max(0, cached - result.usable_tokens), asked)
        known.asked = known.asked * FADING + 1
        known.arrived = known.arrived * FADING + arrived / asked
