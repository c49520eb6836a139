"""Time limits that only the other side can miss. A busy process reads late what is there: an engine would be blamed, and its
request lost, for what the router did not look at."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import httpcore
import httpx

T = TypeVar("T")

LAST_LOOKS = 20
"""Turns of the event loop, each of which reads what has arrived: a connection takes several."""


async def wait_patiently(call: Coroutine[Any, Any, T], seconds: float) -> T:
    """The call's result. Raises TimeoutError if it is not there after this time, nor after LAST_LOOKS; the call is cancelled
    then."""
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait((task,), timeout=seconds)
        for _ in range(LAST_LOOKS):
            if task.done():
                return task.result()
            await asyncio.sleep(0)
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class PatientTransport(httpx.AsyncHTTPTransport):
    """httpx' own, whose time limit for connecting is as above. Ignores proxies from the environment."""

    def __init__(self, limits: httpx.Limits) -> None:
        super().__init__(limits=limits, trust_env=False)
        # httpx hands no backend on to its pool
        self._pool._network_backend = _PatientBackend(self._pool._network_backend)


class _PatientBackend(httpcore.AsyncNetworkBackend):
    def __init__(self, inner: httpcore.AsyncNetworkBackend) -> None:
        self._inner = inner

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - httpcore's interface
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        connecting = self._inner.connect_tcp(host, port, None, local_address, socket_options)
        if timeout is None:
            return await connecting
        try:
            return await wait_patiently(connecting, timeout)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(f"no connection within {timeout:g} s") from error

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
