"""The router client: overlap, cost and choice for routers. A plain install; it imports nothing of the other extras.

from router_client import Prompt, RouterClient, Scope

async with RouterClient.open("redis://127.0.0.1:6379") as router:
    choice = await router.route(Prompt.of_tokens(Scope("llama", "llama"), token_ids))
    print(choice.url, choice.explain())
"""

from kvatlas.cost import Cost, CostProfile, CostTerm, EngineProfile, EngineRates, QuillcacheProfile, ReadRate
from kvatlas.errors import InvalidValue, KvatlasError, LayoutMismatch, Unreachable
from kvatlas.identity import Scope
from kvatlas.request import Fallbacks, RequestHints, RequestShape, SelectionResult, Slo
from kvatlas.reuse import ReuseRule, ReuseRules
from router_client.answers import Choice, PromptOverlap, Ranking, WorkerOverlap
from router_client.client import RouterClient, RouterCounters, RouterSettings
from router_client.errors import NoWorkers
from router_client.fleet import FleetReader, StaticFleet
from router_client.lookup import OverlapIndex
from router_client.prompt import Prompt

__all__ = [
    "Choice",
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
    "NoWorkers",
    "OverlapIndex",
    "Prompt",
    "PromptOverlap",
    "QuillcacheProfile",
    "Ranking",
    "ReadRate",
    "RequestHints",
    "RequestShape",
    "ReuseRule",
    "ReuseRules",
    "RouterClient",
    "RouterCounters",
    "RouterSettings",
    "Scope",
    "SelectionResult",
    "Slo",
    "StaticFleet",
    "Unreachable",
    "WorkerOverlap",
]
