"""Reservations: routers' bookings on a pool's workers. There is one protocol with two implementations (memory, redis)."""

from typing import TYPE_CHECKING, Any

from kvatlas.reservations.lookup import Lookup, LookupChain, LookupImpossible, NotInHbm, Reuse
from kvatlas.reservations.memory import MemoryReservations
from kvatlas.reservations.protocol import (
    STEP_BLOCKS,
    Ask,
    Booking,
    Evaluation,
    LoadReport,
    LookAlikes,
    LookAlikesUnknown,
    Offer,
    OfferEvaluation,
    OfferKind,
    Outcome,
    PairLayout,
    Reservations,
    StepChain,
    WorkerReport,
)
from kvatlas.reservations.waiting_request import MustWait, QueueIsFull, QueueLimits, Turns, WaitingRequest

if TYPE_CHECKING:
    from kvatlas.reservations.redis import RedisReservations

__all__ = [
    "STEP_BLOCKS",
    "Ask",
    "Booking",
    "Evaluation",
    "LoadReport",
    "LookAlikes",
    "LookAlikesUnknown",
    "Lookup",
    "LookupChain",
    "LookupImpossible",
    "MemoryReservations",
    "MustWait",
    "NotInHbm",
    "Offer",
    "OfferEvaluation",
    "OfferKind",
    "Outcome",
    "PairLayout",
    "QueueIsFull",
    "QueueLimits",
    "RedisReservations",
    "Reservations",
    "Reuse",
    "StepChain",
    "Turns",
    "WaitingRequest",
    "WorkerReport",
]


def __getattr__(name: str) -> Any:
    """Import names that need redis-py (9 MiB, a tenth of a second) only when they are used, because publishers don't use
    them."""
    if name == "RedisReservations":
        from kvatlas.reservations.redis import RedisReservations

        return RedisReservations
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
