"""Fetches of KV between engines, as seen by one router: how much of what was requested has arrived.

An answer with fewer cached tokens than predicted did not fetch everything: its source died or had evicted the blocks, or the
engines can't reach each other at all. Later fetches in the pool are priced with the share that arrived. That share recovers
over time, so that a pool whose network has been repaired is tried again.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvatlas.request import SelectionResult
from router_client.learning.token_counts import Usage
from router_client.learning.working_set import WorkingSet
from router_client.pricing.pool import UNKNOWN_DISPLACED

FADING = 0.95
"""Factor by which a fetch's weight shrinks with each later one: about the last twenty fetches matter."""
PRIOR_FETCHES = 0.5
"""Initial evidence for a pool, as if this many fetches had arrived completely."""
RECOVERS_S = 60.0
"""Number of seconds in which all evidence loses two thirds of its weight."""
CONGESTION = 10.0
"""The cost of computing something again, as a multiple of the time that it takes, since it delays other requests
too."""


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
    """See `FetchKnowledge`. `clock`: returns seconds of a monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pools: dict[str, _Arrived] = {}
        self._working_sets: dict[str, WorkingSet] = {}

    def share(self, pool_id: str) -> float:
        """Share of the requested tokens that recent fetches delivered, 0 to 1."""
        known = self._pools.get(pool_id)
        return 1.0 if known is None else known.share(self._clock())

    def displaced_share(self, pool_id: str, capacity_tokens: int | None) -> float:
        """See `FetchKnowledge`. A copy displaces other blocks, which are missed unless another worker holds them too.

        If copies are placed at random, and the working set fits into `capacity_tokens` n times, no worker holds a share of
        exp(-n) of it. At 1, which also applies while the working set is unknown, copies cost as much as computing, so
        nothing is fetched.
        """
        if capacity_tokens is None:
            return UNKNOWN_DISPLACED
        known = self._working_sets.get(pool_id)
        tokens = None if known is None else known.tokens()
        if tokens is None:
            return 1.0
        return min(1.0, CONGESTION * math.exp(-capacity_tokens / tokens)) if tokens else 0.0

    def record_prompt(self, pool_id: str, chain: bytes, block_tokens: int) -> None:
        """See `FetchKnowledge`."""
        known = self._working_sets.get(pool_id)
        if known is None:
            known = self._working_sets[pool_id] = WorkingSet(self._clock)
        known.record(chain, block_tokens)

    def record(self, pool_id: str, result: SelectionResult, usage: Usage) -> None:
        """Learn from an answer. The answer is ignored if nothing was to be fetched for its request, or if it reports no
        cached tokens."""
        asked, cached = result.transferred_tokens, usage.cached_tokens
        if not asked or result.reads_store or cached is None:
            return
        known = self._pools.setdefault(pool_id, _Arrived(at_s=self._clock()))
        known.fade(self._clock())
        arrived = min(max(0, cached - result.usable_tokens), asked)
        known.asked = known.asked * FADING + 1
        known.arrived = known.arrived * FADING + arrived / asked
