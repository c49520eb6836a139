"""Numbers, durations and counts as text for people to read."""

from collections.abc import Iterable


def count_text(count: int, noun: str, plural: str = "") -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


def age_text(age_us: int) -> str:
    """A duration in a suitable unit: `1.5 s`, `3 min`, `2.0 h`."""
    seconds = age_us / 1e6
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def ranges_text(numbers: Iterable[int]) -> str:
    """The numbers as ranges: `0-3, 7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
