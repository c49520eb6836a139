"""Errors of the router client.

KvatlasError
 `- NoWorkers        no worker of the pool may get the request now
"""

from kvatlas.errors import KvatlasError


class NoWorkers(KvatlasError):
    """No worker of the request's pool may get it now: none is known, or none is alive, up and serving prompts."""
