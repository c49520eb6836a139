"""Reservations: what routers book on a pool's workers. One protocol, two implementations (memory, redis)."""

from kvatlas.reservations.memory import MemoryReservations
from kvatlas.reservations.protocol import (
    STEP_BLOCKS,
    Ask,
    Booking,
    Crowd,
    CrowdsUnknown,
    Evaluation,
    LoadReport,
    Offer,
    OfferEvaluation,
    OfferKind,
    Outcome,
    PairLayout,
    Reservations,
    StepChain,
    WorkerReport,
)
from kvatlas.reservations.redis import RedisReservations

__all__ = [
    "STEP_BLOCKS",
    "Ask",
    "Booking",
    "Crowd",
    "CrowdsUnknown",
    "Evaluation",
    "LoadReport",
    "MemoryReservations",
    "Offer",
    "OfferEvaluation",
    "OfferKind",
    "Outcome",
    "PairLayout",
    "RedisReservations",
    "Reservations",
    "StepChain",
    "WorkerReport",
]
