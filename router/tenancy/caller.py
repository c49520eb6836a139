"""Who sends a request, as proven."""

from dataclasses import dataclass, field

from kvatlas.fleet.tenants import PART_MARK
from kvatlas.validation import matches


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may use: in flight of one router process, a minute of the whole fleet; None: all that there is. Tokens: of
    prompts and of their answers."""

    requests_in_flight: int | None = None
    tokens_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    body_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """One sender of requests. `name`: what its limits are counted by, and what logs call it. `tenant_id` None: nothing was
    proven, because this router has one tenant; the settings name it. `models`: names, `*` in them for any text; empty: all.
    `priority`: in the queue; None: the client has none. `is_front`: a gateway that proves its own clients, and is trusted with
    headers about them. `sees_decisions`: its answers have the decision header; None: as the settings say.
    """

    name: str = ""
    tenant_id: str | None = None
    models: tuple[str, ...] = ()
    priority: int | None = None
    limits: Limits = field(default_factory=Limits)
    is_front: bool = False
    sees_decisions: bool | None = None

    @property
    def is_proven(self) -> bool:
        return self.tenant_id is not None

    def may_use(self, model: str) -> bool:
        """May it use a model or adapter of this name?"""
        return not self.models or matches(model, self.models)

    def salted(self, salt: str | None) -> str | None:
        """The cache salt that keeps this tenant's blocks apart on an engine: that of the body counts within the tenant. None
        if no tenant is proven."""
        if self.tenant_id is None:
            return None
        return self.tenant_id if salt is None else f"{self.tenant_id}{PART_MARK}{salt}"


ANYBODY = Caller()
"""Whoever reaches a router without a file of clients."""
