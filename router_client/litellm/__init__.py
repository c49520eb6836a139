"""Chooses the deployments of a LiteLLM `Router` (extra `litellm`)."""

from router_client.litellm.strategy import KvatlasRouting, LitellmCounters

__all__ = ["KvatlasRouting", "LitellmCounters"]
