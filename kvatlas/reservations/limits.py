"""Limits: what a worker would go over if it got a request.

A worker without room (its request slots are taken, or its free KV can't hold the prompt) gets a request only where none
has room. What a service level objective (SLO) asks for may be a price or a limit of the second rank: see `Limits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple


class Over(IntFlag):
    """What would be gone over: the SLO's time to the first token, or for each further one; request slots; KV blocks."""

    TTFT = 1
    TPOT = 2
    SLOTS = 4
    KV = 8

    @property
    def names(self) -> tuple[str, ...]:
        """As users read it."""
        return tuple(_NAMES[one] for one in Over if one in self)


NOTHING = Over(0)
NO_ROOM = Over.SLOTS | Over.KV
MISSES_SLO = Over.TTFT | Over.TPOT

_NAMES = {Over.TTFT: "ttft", Over.TPOT: "tpot", Over.SLOTS: "slots", Over.KV: "kv"}


class Limit(NamedTuple):
    """Of one offered worker; 0: it does not tell. `slots`: requests that run at once. `kv_tokens`: that its cache holds.

    `decode_us`: what all tokens behind the first take there without load.
    """

    slots: int = 0
    kv_tokens: int = 0
    decode_us: float = 0.0


NOT_TOLD = Limit()


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an ask, `of_offers` in its order. A worker that does not tell its load, or too long ago, has room.

    The request asks for its first token within `ttft_us`, and for all further ones within `decode_us` (0: for nothing).
    What it would take longer costs `slo_factor` times as much; with `slo_filters` a worker that takes longer is chosen
    only where all do that have room.
    """

    of_offers: Sequence[Limit]
    input_tokens: int
    ttft_us: float = 0.0
    decode_us: float = 0.0
    slo_factor: float = 0.0
    slo_filters: bool = False


def level(over: int, *, slo_filters: bool) -> int:
    """0: a worker that goes over nothing which counts; 1: chosen only where no 0 is left; 2: only where no 1 is."""
    if over & NO_ROOM:
        return 2
    return 1 if slo_filters and over & MISSES_SLO else 0
