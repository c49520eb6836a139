"""Byte-seconds of residency: how much of the engines' memory a tenant's blocks took up, and for how long.

The bytes of a worker count from the call that applied the message about them until the call that removed them, by the store's
clock; those of a snapshot count from its end. The size of a block is the last one that its worker reported; blocks of unknown
size count as 0, as in `ResidentBlocks`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope


@dataclass(frozen=True, slots=True)
class ResidentUse:
    """The usage of one scope in one tier by all workers, since the index began. `scope=None`: all scopes whose names have been
    forgotten."""

    scope: Scope | None
    tier: Tier
    byte_seconds: float


def sum_use(amounts: Iterable[tuple[bytes, Tier, float]], scopes: Mapping[bytes, Scope]) -> list[ResidentUse]:
    """Sum up (scope id, tier, byte-seconds), ordered by the text of the scopes, then by tier."""
    found: dict[tuple[Scope | None, Tier], float] = {}
    for scope_id, tier, amount in amounts:
        place = scopes.get(scope_id), tier
        found[place] = found.get(place, 0.0) + amount
    rows = [ResidentUse(scope, tier, amount) for (scope, tier), amount in found.items()]
    return sorted(rows, key=lambda row: (str(row.scope or ""), row.tier))
