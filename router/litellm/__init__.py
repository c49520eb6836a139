"""Chooses the deployments of a LiteLLM `Router` (extra `litellm`)."""

from kvatlas_router.litellm.strategy import KvatlasRouting, LitellmCounters

__all__ = ["KvatlasRouting", "LitellmCounters"]
