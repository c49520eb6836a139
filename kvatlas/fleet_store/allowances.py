"""Clients' allowances per minute, shared by all routers of a fleet: one allowance for each client and kind, in the store.

Routers draw from an allowance ahead of their requests, and put back what they don't need. It refills continuously;
its size is what refills in a minute.

    kva:{fleet}:limit:<kind>:<client>   HASH  left, at: `functions/draw.lua`; expires when the allowance is full
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ALLOWANCES_A_CALL = 200
MINUTE_S = 60.0
MOST_DEBT = 10
"""Maximum number of minutes that an allowance takes to refill: no client pays longer for one answer, or for a router's false
figures."""


class Draw(NamedTuple):
    """`size`: of the allowance. `back`: the amount returned; below 0: used without being drawn. `wanted`: the amount to draw,
    if available."""

    name: str
    size: int
    back: int
    wanted: int


class Drawn(NamedTuple):
    """`left`: the rest of the allowance; below 0: overdrawn."""

    taken: int
    left: int


class SharedAllowances(Protocol):
    """A store of allowances."""

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        """Make these draws in order. Raises Unreachable, and redis' ResponseError if the store's user may not draw."""


def allowance_key(name: str) -> str:
    return f"kva:{{fleet}}:limit:{name}"
