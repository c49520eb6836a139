"""Measures the duration of consecutive calls."""

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from time import perf_counter


def time_calls(calls: Iterable[Callable[[], object]]) -> list[float]:
    """The seconds of each call, sorted."""
    times = []
    for call in calls:
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
    return sorted(times)


async def time_async_calls(calls: Iterable[Callable[[], Awaitable[object]]]) -> list[float]:
    """The seconds of each call, sorted."""
    times = []
    for call in calls:
        began = perf_counter()
        await call()
        times.append(perf_counter() - began)
    return sorted(times)


def quantile(sorted_values: Sequence[float], q: float) -> float:
    """The smallest value that at least a fraction q of all values does not exceed."""
    return sorted_values[max(0, math.ceil(q * len(sorted_values)) - 1)]
