"""Limits that a worker would exceed if it got a request.

A worker without room (no free request slot, or too little free KV for the prompt) gets a request only if no worker has room. A
service level objective (SLO) may act as a price or as a secondary limit: see `Limits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple

from kvatlas.fleet.records import FleetRecord


class Over(IntFlag):
    """The limits that are exceeded: the SLO's time to the first token, or for each later one; request slots; KV blocks."""

    TTFT = 1
    TPOT = 2
    SLOTS = 4
    KV = 8

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the limits, as users see them."""
        return tuple(_NAMES[one] for one in Over if one in self)


NOTHING = Over(0)
NO_ROOM = Over.SLOTS | Over.KV
MISSES_SLO = Over.TTFT | Over.TPOT

_NAMES = {Over.TTFT: "ttft", Over.TPOT: "tpot", Over.SLOTS: "slots", Over.KV: "kv"}


class Limit(NamedTuple):
    """The limits of one worker with an offer; 0: unknown. `slots`: how many requests run at the same time. `kv_tokens`: the
    capacity of its cache.

    `decode_us`: the time for all tokens after the first, on this worker without load.
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
    """The limits of an ask; `of_offers` follows the order of its offers. If `look_alikes_have_room` is set, look-alikes have
    room; otherwise the limits that they reported are checked. A worker whose load is unknown or too old has room.

    The request's SLO: its first token within `ttft_us`, and all later ones within `decode_us` (0: no objective). Each us in
    excess costs `slo_factor` us more. If `slo_filters` is set, a worker that misses the SLO is chosen only if all workers with
    room miss it.
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
    """0: exceeds nothing that counts; 1: chosen only if no 0 is left; 2: chosen only if no 1 is left either."""
    if not over:
        return 0
    if over & NO_ROOM:
        return FULL
    return 1 if slo_filters and over & MISSES_SLO else 0
