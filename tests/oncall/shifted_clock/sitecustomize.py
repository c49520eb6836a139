"""Python imports this from PYTHONPATH at startup. It makes the process's clock wrong, but not its timers, which are
monotonic."""

import os
import time

SHIFT_S = float(os.environ["ONCALL_CLOCK_SHIFT_S"])
_time, _time_ns = time.time, time.time_ns


def _shifted() -> float:
    return _time() + SHIFT_S


def _shifted_ns() -> int:
    return _time_ns() + round(SHIFT_S * 1e9)


time.time, time.time_ns = _shifted, _shifted_ns
