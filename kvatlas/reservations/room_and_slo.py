"""Limits that a worker would exceed if it got a request.

A worker without room (no free request slot, or too little free KV for the prompt) gets a request only if no worker has
room. A service level objective (SLO) may be a price, or a secondary limit: see `Limits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from kvatlas.fleet.records import FleetRecord


class Over(IntFlag):
    """Exceeded limits: the SLO's time to the first token, or for each later one; request slots; KV blocks."""

    TTFT = 1
    TPOT = 2
    SLOTS = 4
    KV = 8

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the limits, as users read them."""
        return tuple(_NAMES[one] for one in Over if one in self)


NOTHING = Over(0)
NO_ROOM = Over.SLOTS | Over.KV
MISSES_SLO = Over.TTFT | Over.TPOT

_NAMES = {Over.TTFT: "ttft", Over.TPOT: "tpot", Over.SLOTS: "slots", Over.KV: "kv"}


class Limit(NamedTuple):
    """Limits of one offered worker; 0: unknown. `slots`: requests that run at once. `kv_tokens`: capacity of its cache.

    `decode_us`: the time that all tokens after the first take there, without load.
    """

    slots: int = 0
    kv_tokens: int = 0
    decode_us: float = 0.0


UNKNOWN_LIMIT = Limit()


def limit_of(record: FleetRecord) -> Limit:
    """The limits that the worker reports."""
    if record.load is None:
        return UNKNOWN_LIMIT
    metrics = record.load.forward_pass
    return Limit(metrics.total_request_slots, metrics.total_kv_blocks * (record.endpoint.block_size or 0))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an ask; `of_offers` follows the order of its offers. Look-alikes have room if `look_alikes_have_room`;
    otherwise their reported limits are checked. A worker whose load is unknown or too old has room.

    The request's SLO: its first token within `ttft_us`, and all later ones within `decode_us` (0: no objective). Each us
    of excess costs `slo_factor` us more. With `slo_filters`, a worker that misses the SLO is chosen only if all workers
    with room miss it.
    """

    of_offers: Sequence[Limit]
    input_tokens: int
    ttft_us: float = 0.0
    decode_us: float = 0.0
    slo_factor: float = 0.0
    slo_filters: bool = False
    look_alikes_have_room: bool = False


FULL = 2
"""The level of a worker without room."""


def level(over: int, *, slo_filters: bool) -> int:
    """0: exceeds nothing that counts; 1: chosen only if no 0 is left; 2: chosen only if no 1 is left."""
    if not over:
        return 0
    if over & NO_ROOM:
        return FULL
    return 1 if slo_filters and over & MISSES_SLO else 0
