"""The router client: overlap, cost and choice for routers. It needs the plain install only, none of the extras.

from router_client import Prompt, RouterClient, Scope

async with RouterClient.open("redis://127.0.0.1:6379") as router:
    async with router.route(Prompt.of_tokens(Scope("llama", "llama"), token_ids)) as choice:
        print(choice.url, choice.explain())

`SyncRouterClient` is the same without `async` and `await`.

The way of one choice through the files:

    client.py, sync.py          the calls; results.py and prefill_decode_result.py are what they return
    decision/decider.py         the steps below under one deadline; decision/fail_open.py if the store is slow or away
      decision/fleet_cache.py   read the pool's workers (pricing/pool.py)
      decision/index_lookup.py  look up the prompt's overlap (prompt_chain.py, chain_cache.py, pricing/overlap.py)
      decision/policy.py        price the candidates without load (pricing/quotes.py, prefill_decode.py, surcharges.py)
      booking/ask.py            ask for the cheapest under load, within its limits (pricing/slo.py)
      booking/booker.py         look or book, in the store or alone (booking/reservation.py, leases.py)
    pricing/ranking.py          every candidate with its terms, computed when it is read
    learning/                   afterwards: rates learned from finished requests, and prediction accuracy

Around it: tokens/ from text to token ids, proxy/ for `kvatlas router`, held_bookings.py for requests that other programs
send, litellm/ for LiteLLM's Router.
"""

from kvatlas.blocks.reuse import ReuseRule, ReuseRules
from kvatlas.cost import Cost, CostProfile, CostTerm, EngineProfile, EngineRates, QuillcacheProfile, ReadRate
from kvatlas.errors import InvalidValue, KvatlasError, LayoutMismatch, Unreachable
from kvatlas.identity import Scope
from kvatlas.request import Fallbacks, RequestHints, RequestShape, SelectionResult, Slo
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations
from kvatlas.reservations.limits import Over
from router_client.client import RouterClient
from router_client.counters import RouterCounters
from router_client.decision.fail_open import Basis
from router_client.decision.fleet_cache import FleetReader, StaticFleet
from router_client.decision.selector import Selector
from router_client.errors import ClientClosed, NoWorkers
from router_client.learning.timings import AnswerClock, Timings
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.overlap import OverlapIndex
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt
from router_client.results import Choice, PromptOverlap, Ranking, WorkerOverlap
from router_client.settings import (
    BookingSettings,
    LearningSettings,
    LimitSettings,
    PairSettings,
    Policy,
    RoundRobin,
    RouterSettings,
    SloMode,
)
from router_client.sync import SyncChoice, SyncPairChoice, SyncRouterClient
from router_client.tokens.usage import Usage

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
    "SyncChoice",
    "SyncPairChoice",
    "SyncRouterClient",
    "Timings",
    "Unreachable",
    "Usage",
    "WorkerOverlap",
]
