"""The priority of a request in its engine's own queue: short work first, within a bound.

In an engine that serves requests in order of arrival, all later requests wait behind a long prompt. With this priority (lower
first), a later request overtakes a waiting one if the difference in what they have to compute, times `WORK_FACTOR`, exceeds
the time between their arrivals. So only requests that arrive within `WORK_FACTOR` times a request's own work can overtake it.
"""

from kvatlas.cost.protocol import Cost

WORK_FACTOR = 10.0
"""Microseconds of waiting for each microsecond of own work. Larger: closer to the shortest first, and longer waits."""
_WORK = "prefill"


def engine_priority(arrived_us: float, cost: Cost) -> int:
    """The priority in milliseconds, lower first. `arrived_us`: on a clock that all routers share; `cost`: at the chosen worker;
    its term `prefill` is the time to compute the uncached prompt."""
    work_us = sum(us for kind, us in zip(cost.kinds, cost.us, strict=True) if kind.name == _WORK)
    return round((arrived_us + WORK_FACTOR * work_us) / 1e3)
