"""HTTP clients for servers on this machine."""

from functools import cache
from ssl import SSLContext
from typing import Any

import httpx


@cache
def trusted() -> SSLContext:
    """The system's authorities, read once: reading them takes 35 ms of CPU time, which each client would otherwise spend."""
    return httpx.create_ssl_context(trust_env=False)


def http_client(**options: Any) -> httpx.AsyncClient:
    """A client with httpx' options that ignores the environment's proxies."""
    return httpx.AsyncClient(trust_env=False, verify=trusted(), **options)
