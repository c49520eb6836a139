"""The priority of a request in its engine's own queue: short work goes first, within limits.

In an engine that serves requests in order of arrival, all later requests wait behind a long prompt. With this priority (lower
first), a later request overtakes a waiting one if the difference in what they have to compute, times `WORK_FACTOR`, exceeds
the time between their arrivals. So only requests that arrive within `WORK_FACTOR` times a request's own work can overtake it.
"""

from kvatlas.cost.protocol import Cost

WORK_FACTOR = 10.0
"""Microseconds of waiting per microsecond of a request's own work. A larger factor comes closer to shortest-first, but
makes waits longer."""
_WORK = "prefill"


def engine_priority(arrived_us: float, cost: Cost) -> int:
    """The priority in milliseconds; lower values come first. `arrived_us`: time of arrival, on a clock that all routers share;
    `cost`: the cost at the chosen worker; its term `prefill` is the time to compute the uncached prompt."""
    work_us = sum(us for kind, us in zip(cost.kinds, cost.us, strict=True) if kind.name == _WORK)
    return round((arrived_us + WORK_FACTOR * work_us) / 1e3)
