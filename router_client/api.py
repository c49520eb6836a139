"""Everything that `router_client` exports. That package imports this one when its first name is used."""

from kvatlas.blocks.residency import Residency
from kvatlas.blocks.reuse import ReuseRule, ReuseRules
from kvatlas.cost import Cost, CostProfile, CostTerm, EngineProfile, EngineRates, QuillcacheProfile, ReadRate
from kvatlas.errors import InvalidValue, KvatlasError, LayoutMismatch, NotSupported, Unreachable
from kvatlas.identity import Scope
from kvatlas.request import Fallbacks, RequestHints, RequestShape, SelectionResult, Slo
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.reservations.room_and_slo import Over
from router_client.basis import Basis
from router_client.client import RouterClient
from router_client.counters import RouterCounters
from router_client.decision.selector import Selector
from router_client.decision.shadow_policy import Policy, RoundRobin
from router_client.errors import ClientClosed, NoWorkers
from router_client.fleet_cache import FleetReader, StaticFleet
from router_client.learning.timings import AnswerClock, Timings
from router_client.learning.token_counts import Usage
from router_client.overlap_result import PromptOverlap, WorkerOverlap
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.overlap import OverlapIndex
from router_client.pricing.slo import Advice
from router_client.prompt import OutputLimits, Prompt, Strategy
from router_client.results import Choice, Ranking
from router_client.settings import (
    BookingSettings,
    LearningSettings,
    LimitSettings,
    PairSettings,
    RouterSettings,
    SloMode,
)
from router_client.sync import SyncChoice, SyncPairChoice, SyncRouterClient

__all__ = [
    "Advice",
    "AnswerClock",
    "Basis",
    "BookingSettings",
    "Choice",
    "ClientClosed",
    "Cost",
    "CostProfile",
    "CostTerm",
    "EngineProfile",
    "EngineRates",
    "Fallbacks",
    "FleetReader",
    "InvalidValue",
    "KvatlasError",
    "LayoutMismatch",
    "LearningSettings",
    "LimitSettings",
    "MemoryReservations",
    "NoWorkers",
    "NotSupported",
    "OutputLimits",
    "Over",
    "OverlapIndex",
    "PairChoice",
    "PairSettings",
    "Policy",
    "Prompt",
    "PromptOverlap",
    "QuillcacheProfile",
    "Ranking",
    "ReadRate",
    "RedisReservations",
    "RequestHints",
    "RequestShape",
    "Reservations",
    "Residency",
    "ReuseRule",
    "ReuseRules",
    "RoundRobin",
    "RouterClient",
    "RouterCounters",
    "RouterSettings",
    "Scope",
    "SelectionResult",
    "Selector",
    "Slo",
    "SloMode",
    "StaticFleet",
    "Strategy",
    "SyncChoice",
    "SyncPairChoice",
    "SyncRouterClient",
    "Timings",
    "Unreachable",
    "Usage",
    "WorkerOverlap",
]
