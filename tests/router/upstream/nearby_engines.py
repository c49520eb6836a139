"""A client for engines on this machine."""

from kvatlas_router.upstream.engine_addresses import AddressPolicy
from kvatlas_router.upstream.engine_client import EngineClient

TIMEOUT_S = 60.0


def engine_client(timeout_s: float = TIMEOUT_S, **changed: float) -> EngineClient:
    """A client; enter it (`async with`)."""
    return EngineClient(AddressPolicy(near=True), timeout_s, **changed)
