"""The embedded servers for asyncio: the same processes, without blocking the event loop."""

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, Self

import anyio
from anyio.from_thread import check_cancelled
from anyio.to_thread import run_sync

from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.server_process import ServerProcess
from kvatlas.embedded.valkey import ValkeyProcess

P = ParamSpec("P")


class EmbeddedServer:
    """A server process as an async context manager: started on entry and gone on exit, even if cancelled.

    `start`, `stop`, `kill` and `restart` return once the server answers or is gone. See ServerProcess for each of them.
    """

    def __init__(self, process: ServerProcess) -> None:
        self.process = process

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await run_sync(self.process.close)

    @property
    def url(self) -> str:
        """The address that clients connect to."""
        return self.process.url

    @property
    def port(self) -> int:
        return self.process.port

    @property
    def pid(self) -> int:
        """The process id. Raises EmbeddedServerError when it is not running."""
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process.is_running

    async def start(self) -> None:
        await run_sync(partial(self.process.start, while_waiting=check_cancelled))

    async def stop(self) -> None:
        await run_sync(self.process.stop)

    async def kill(self) -> None:
        await run_sync(self.process.kill)

    async def restart(self) -> None:
        await run_sync(partial(self.process.restart, while_waiting=check_cancelled))

    def pause(self) -> None:
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()


def _on_asyncio(process: Callable[P, ServerProcess]) -> Callable[P, EmbeddedServer]:
    """A constructor for asyncio with the same parameters as `process`."""

    def construct(*args: P.args, **kwargs: P.kwargs) -> EmbeddedServer:
        return EmbeddedServer(process(*args, **kwargs))

    return construct


nats_server = _on_asyncio(NatsProcess)
"""A NATS server with JetStream; the parameters are those of NatsProcess. Raises EmbeddedServerError if its program is not
found."""

valkey_server = _on_asyncio(ValkeyProcess)
"""A Valkey server; the parameters are those of ValkeyProcess. Raises EmbeddedServerError if its program is not found."""
