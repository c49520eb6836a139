"""What the doctor says: a check, how it came out, in one line, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MOST_NAMES = 8


class Level(StrEnum):
    """`ERROR`: something does not work, or answers may be wrong. `WARNING`: it works worse than it could."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check`: its stable name, `<part>.<what>`. `advice` empty where nothing is to be done."""

    check: str
    level: Level
    line: str
    advice: str = ""


def many(number: int, noun: str) -> str:
    """A number of things in words."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listed(names: Iterable[str]) -> str:
    """Names in a line, the first ones where they are many."""
    every = sorted(names)
    more = len(every) - MOST_NAMES
    return ", ".join(every[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
