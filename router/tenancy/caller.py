"""A request's proven sender."""

from dataclasses import dataclass, field

from kvatlas.fleet.tenants import PART_MARK
from kvatlas.validation import matches


@dataclass(frozen=True, slots=True)
class Limits:
    """A client's limits: those in flight hold in one router process, those per minute in the whole fleet. None:
    unlimited. Tokens count prompts and answers."""

    requests_in_flight: int | None = None
    tokens_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """One sender of requests. `name`: its name in logs and the key of its limits. `tenant_id=None`: nothing was proven,
    because this router has one tenant, which the settings name. `models`: patterns of names, `*` for any text; empty:
    all. `priority`: its priority in the queue; None: it has none. `is_front`: a gateway that authenticates its own
    clients, so its headers about them are trusted. `sees_decisions`: its answers carry the decision header; None: the
    settings decide. `weight`: its share of the queue, relative to other tenants.
    """

    name: str = ""
    tenant_id: str | None = None
    models: tuple[str, ...] = ()
    priority: int | None = None
    limits: Limits = field(default_factory=Limits)
    is_front: bool = False
    sees_decisions: bool | None = None
    weight: float = 1.0

    @property
    def is_proven(self) -> bool:
        return self.tenant_id is not None

    def may_use(self, model: str) -> bool:
        """True if the caller may use a model or adapter with this name."""
        return not self.models or matches(model, self.models)

    def salted(self, salt: str | None) -> str | None:
        """The cache salt that keeps this tenant's blocks apart on an engine, including the body's own `salt`. None if no tenant
        has been proven."""
        if self.tenant_id is None:
            return None
        return self.tenant_id if salt is None else f"{self.tenant_id}{PART_MARK}{salt}"


ANYBODY = Caller()
"""Every caller of a router without a clients file."""
