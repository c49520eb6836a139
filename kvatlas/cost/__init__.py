"""The cost of a request on a worker, in microseconds, term by term: one protocol and two profiles."""

from kvatlas.cost.engine import EngineProfile, EngineRates
from kvatlas.cost.protocol import Cost, CostProfile, CostTerm, Load, Piece, Plan, Prices, ReadRate, TermKind, mean_load
from kvatlas.cost.quillcache import QuillcacheProfile

__all__ = [
    "Cost",
    "CostProfile",
    "CostTerm",
    "EngineProfile",
    "EngineRates",
    "Load",
    "Piece",
    "Plan",
    "Prices",
    "QuillcacheProfile",
    "ReadRate",
    "TermKind",
    "mean_load",
]
