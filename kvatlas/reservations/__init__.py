"""Reservations: what routers book on a pool's workers, one protocol, two implementations (memory, redis)."""

from kvatlas.reservations.memory import MemoryReservations
from kvatlas.reservations.protocol import (
    STEP_BLOCKS,
    Ask,
    Booking,
    LoadReport,
    Offer,
    OfferKind,
    Outcome,
    Pairing,
    Reservations,
    StepChain,
    Weighed,
    Weighing,
    WorkerReport,
)
from kvatlas.reservations.redis import RedisReservations

__all__ = [
    "STEP_BLOCKS",
    "Ask",
    "Booking",
    "LoadReport",
    "MemoryReservations",
    "Offer",
    "OfferKind",
    "Outcome",
    "Pairing",
    "RedisReservations",
    "Reservations",
    "StepChain",
    "Weighed",
    "Weighing",
    "WorkerReport",
]
