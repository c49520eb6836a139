"""The outcomes of scenarios, as rows and as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PROPERTY = "chaos outcome"
"""Property of a test's result: its outcome, as a dictionary."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario, or one round of random faults. `wrong`: residencies in the index that no engine has, at the end;
    `missing`: residencies of the engines that are not in the index, which is safe."""

    name: str
    faults: Sequence[str]
    events: int
    residencies: int
    exact_after_s: float
    wrong: int
    missing: int
    times_s: Mapping[str, float] = field(default_factory=dict)
    """Other measured times, by description."""


def as_text(outcomes: Sequence[Outcome]) -> str:
    """A table with one line for each outcome, and the sums."""
    lines = [
        f"{'scenario':44} {'faults':>6} {'events':>8} {'blocks':>7} {'exact after':>12} {'wrong':>6} {'missing':>8}"
    ]
    for one in outcomes:
        lines.append(
            f"{one.name:44.44} {len(one.faults):6} {one.events:8} {one.residencies:7} {one.exact_after_s:10.2f} s "
            f"{one.wrong:6} {one.missing:8}"
        )
        lines += [f"    {what}: {seconds:.2f} s" for what, seconds in one.times_s.items()]
    faults = sum(len(one.faults) for one in outcomes)
    events = sum(one.events for one in outcomes)
    slowest = max((one.exact_after_s for one in outcomes), default=0.0)
    wrong = sum(one.wrong for one in outcomes)
    lines.append(
        f"{faults} faults injected, {events} engine events sent, slowest {slowest:.2f} s to exact, "
        f"{wrong} residencies wrong at the end"
    )
    return "\n".join(lines)
