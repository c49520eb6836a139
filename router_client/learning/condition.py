"""Measures the condition of this router, for its reports: `kvatlas.predictions.condition`."""

import time
from collections.abc import Callable
from typing import NamedTuple

from kvatlas.predictions.condition import RouterCondition
from kvatlas.predictions.recent_counts import RecentCounts
from kvatlas.runtime.descriptors import count_descriptors
from kvatlas.store.distance import StoreDistance
from router_client.counters import RouterCounters


class RequestEnds(NamedTuple):
    """Requests that ended since the server started: all of them, those that no engine took, and those whose client gave
    up."""

    requests: int = 0
    refused: int = 0
    gone: int = 0


class ConditionMeter:
    """Reads the condition. `ends`, `proves_tenants` and `limits_shared` are set by a server built on this library."""

    def __init__(self, counters: RouterCounters, distance: StoreDistance, deadline_ms: float | None) -> None:
        """`deadline_ms`: the minimum time for which a decision may wait for the store."""
        self._counters = counters
        self._distance = distance
        self._deadline_ms = deadline_ms
        self._recent = RecentCounts()
        self.ends: Callable[[], RequestEnds] = RequestEnds
        self.proves_tenants: bool | None = None
        self.limits_shared: Callable[[], bool | None] = lambda: None

    def read(self) -> RouterCondition:
        counters, descriptors = self._counters, count_descriptors()
        fell_open = counters.open_index + counters.open_fleet + counters.open_booking + counters.open_connections
        since_start = {
            "choices": counters.routed,
            "fell_open": fell_open,
            "without_index": counters.open_index,
            "no_workers": counters.no_workers,
            **self.ends()._asdict(),
        }
        return RouterCondition(
            sent_us=time.time_ns() // 1_000,
            store_us=round(self._distance.round_trip_s * 1e6),
            store_is_far=self._distance.is_far(self._deadline_ms),
            descriptors=descriptors.open,
            most_descriptors=max(0, descriptors.most),
            proves_tenants=self.proves_tenants,
            limits_shared=self.limits_shared(),
            **{name: max(0, value) for name, value in self._recent.grown(since_start).items()},
        )
