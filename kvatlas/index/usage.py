"""For how long how many bytes were resident: what a tenant's blocks took of the engines' memory.

A worker's bytes count from the call that applied the message about them to the one that took them away, by the store's
clock; those of a snapshot from its end. A block's size is the one that its worker told last, so that bytes of unknown size
count as 0, as in `ResidentBlocks`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope


@dataclass(frozen=True, slots=True)
class ResidentUse:
    """Usage of one scope in one tier by all workers, since the index began. `scope` None: all scopes with forgotten names."""

    scope: Scope | None
    tier: Tier
    byte_seconds: float


def sum_use(amounts: Iterable[tuple[bytes, Tier, float]], scopes: Mapping[bytes, Scope]) -> list[ResidentUse]:
    """Sum (scope id, tier, byte-seconds) by the scopes' text, then by tier."""
    found: dict[tuple[Scope | None, Tier], float] = {}
    for scope_id, tier, amount in amounts:
        place = scopes.get(scope_id), tier
        found[place] = found.get(place, 0.0) + amount
    rows = [ResidentUse(scope, tier, amount) for (scope, tier), amount in found.items()]
    return sorted(rows, key=lambda row: (str(row.scope or ""), row.tier))
