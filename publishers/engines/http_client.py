"""A publisher's HTTP client for its engine."""

import httpx

from kvatlas.engine_access import EngineAccess


def engine_http(url: str, worker_id: str, access: EngineAccess, timeout_s: float) -> httpx.AsyncClient:
    """Create a client with the engine's API key and CA certificates. Ignores proxies from the environment, because the
    engine is in the same pod or close to it."""
    tls = access.tls_context() if url.startswith("https:") else False  # the system's CA certificates take megabytes
    headers = access.headers_of(worker_id)
    return httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, verify=tls, timeout=timeout_s, trust_env=False)
