"""Chooses the deployments of a LiteLLM `Router` (extra `litellm`)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvatlas_router.litellm.strategy import KvatlasRouting, LitellmCounters

__all__ = ["KvatlasRouting", "LitellmCounters"]


def __getattr__(name: str) -> Any:
    """Import LiteLLM when a public name is first used: the import takes seconds, and `deployments` works without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.strategy"), name)
