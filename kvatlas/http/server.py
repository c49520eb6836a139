"""An HTTP server inside a process that does other work too: a bound socket, and uvicorn without signal handlers."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.types import ASGIApp

from kvatlas.addresses import is_loopback
from kvatlas.errors import SettingsError
from kvatlas.http.access import HttpAccess
from kvatlas.http.bounded_protocol import PROBE_S, BoundedProtocol
from kvatlas.http.connection_shares import Closable, ConnectionShares, Place
from kvatlas.http.counters import HttpCounters
from kvatlas.http.guard import HttpBorder
from kvatlas.runtime.background_task import end_tasks
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.telemetry import export_metrics

ACCEPT_AGAIN_S = 0.1
"""Pause after a connection that could not be accepted."""

_log = logging.getLogger("kvatlas.http")


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound socket, the access rules of the server behind it, and the connections to it."""

    socket: socket.socket
    access: HttpAccess
    tls: ssl.SSLContext | None
    shares: ConnectionShares[Closable]

    @property
    def url(self) -> str:
        """The base URL."""
        host, port = self.socket.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"{'https' if self.tls else 'http'}://{place}"

    @property
    def is_near(self) -> bool:
        """True if the socket is bound to loopback."""
        return is_loopback(self.socket.getsockname()[0])

    def close(self) -> None:
        """Close the socket. Closing twice is fine."""
        self.socket.close()


def listen(host: str, port: int, what: str, access: HttpAccess | None = None, *, shared: bool = False) -> Listener:
    """Bind a socket; port 0 takes a free port. `shared`: other processes may listen on it as well. Raises SettingsError, which
    mentions `what`, if the address or the certificate is unusable."""
    access = access or HttpAccess()
    tls = access.tls_context()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise SettingsError(f"{what} can't listen on {host}:{port}: {error.strerror or error}") from error
    bound.setblocking(False)
    return Listener(bound, access, tls, ConnectionShares(access.connections, access.address_share))


async def serve(
    application: ASGIApp,
    listener: Listener,
    *,
    grace_s: int = 1,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then give open responses `grace_s` to end. `task_status` is set to started once the server accepts
    connections.

    With a grace period of 0, uvicorn would log that it cancelled tasks even if none were running.
    """
    access, counters, refusals = listener.access, HttpCounters(), RateLimitedLog(_log)
    protocol = partial(BoundedProtocol, access=access, shares=listener.shares, counters=counters, refusals=refusals)
    config = uvicorn.Config(
        HttpBorder(application, access, counters, refusals, near=listener.is_near),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # a client's address is that of its connection, whatever X-Forwarded-For says
        lifespan="off",
        timeout_graceful_shutdown=grace_s,
        timeout_keep_alive=access.idle_s,
    )
    config.load()
    server = _Server(config, listener, counters, refusals, task_status)

    async def stop_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            server.should_exit = True

    try:
        with export_metrics("http", counters):
            async with anyio.create_task_group() as running:
                running.start_soon(stop_when_cancelled)
                with anyio.CancelScope(shield=True):
                    await server.serve(sockets=[listener.socket])
                running.cancel_scope.cancel()
    finally:
        listener.close()


class _Arriving:
    """A connection whose TLS handshake has not been completed. It takes up a place like any other connection."""

    def close_idle(self) -> None:
        """Never called: it is never idle."""


class _Server(uvicorn.Server):
    """A server that leaves signals to the process, and reports when it accepts connections.

    With TLS, it accepts connections itself: uvicorn would only learn of a connection after its handshake, which may take a
    minute, and any number of clients could delay theirs.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listener: Listener,
        counters: HttpCounters,
        refusals: RateLimitedLog,
        task_status: TaskStatus[None],
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._counters = counters
        self._refusals = refusals
        self._task_status = task_status
        self._tasks: set[asyncio.Task[None]] = set()
        """The tasks that accept connections, and one task for each TLS handshake."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if (tls := self._listener.tls) is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self._listener.socket.listen(self.config.backlog)
            self._run(self._accept(tls))
        self._task_status.started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await end_tasks(list(self._tasks))
        await super().shutdown(sockets)

    def _run(self, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(body)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, tls: ssl.SSLContext) -> None:
        loop, access, shares = asyncio.get_running_loop(), self._listener.access, self._listener.shares
        while True:
            try:
                connection, address = await loop.sock_accept(self._listener.socket)
            except OSError:  # no descriptor is left, or the client has already gone
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            arriving = _Arriving()
            place = shares.open(arriving, address[0])
            if place in (Place.FULL, Place.PROBES):
                seconds = access.header_s if place is Place.FULL else min(PROBE_S, access.header_s)
                self._run(self._agree(connection, tls, arriving, seconds))
            else:  # the client can't be answered before the handshake
                self._counters.too_many += 1
                self._refusals.report("connections", shares.describe_refusal(address[0]))
                shares.close(arriving)
                connection.close()

    async def _agree(self, connection: socket.socket, tls: ssl.SSLContext, arriving: _Arriving, seconds: float) -> None:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        state, app_state = self.server_state, self.lifespan.state
        protocol = partial(make, config=self.config, server_state=state, app_state=app_state, arriving=arriving)
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(protocol, connection, ssl=tls, ssl_handshake_timeout=seconds)
        except OSError:  # the client does not speak TLS, or did not in time
            connection.close()
        finally:
            self._listener.shares.close(arriving)
