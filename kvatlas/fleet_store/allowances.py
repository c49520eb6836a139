"""Clients' allowances per minute, which all routers of a fleet share: the store holds one allowance for each client and kind.

Routers draw from an allowance in advance, and return what their requests did not need. An allowance refills continuously; its
size is the amount that is refilled in a minute.

    kva:{fleet}:limit:<kind>:<client>   HASH  left, at: `functions/draw.lua`; expires when the allowance is full
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ALLOWANCES_A_CALL = 200
MINUTE_S = 60.0
MOST_DEBT = 10
"""Maximum number of minutes that it takes to refill an allowance, so that no client pays for longer than this for one answer,
or for a router's false figures."""


class Draw(NamedTuple):
    """`size`: the size of the allowance. `back`: the amount that is returned; below 0: an amount that was used without being
    drawn. `wanted`: the amount to draw, if it is available."""

    name: str
    size: int
    back: int
    wanted: int


class Drawn(NamedTuple):
    """`left`: what is left of the allowance; below 0: it is overdrawn."""

    taken: int
    left: int


class SharedAllowances(Protocol):
    """A store that holds allowances."""

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        """Make these draws in order. Raises Unreachable, or redis' ResponseError if the store's user is not allowed to draw."""


def allowance_key(name: str) -> str:
    return f"kva:{{fleet}}:limit:{name}"
