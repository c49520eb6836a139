"""The doctor's findings, each with its check, its level, a line of text, and what to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

MAX_NAMES = 8


class Level(StrEnum):
    """`ERROR`: something does not work, or answers may be wrong. `WARNING`: something works worse than it could."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """`check`: the stable name of the check, `<part>.<what>`. `advice` is empty if there is nothing to do."""

    check: str
    level: Level
    line: str
    advice: str = ""


def join_names(names: Iterable[str]) -> str:
    """The names, sorted and joined into one line, at most MAX_NAMES of them."""
    ordered = sorted(names)
    more = len(ordered) - MAX_NAMES
    return ", ".join(ordered[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
