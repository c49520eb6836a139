"""A port in front of a server that does not limit its connections, such as gRPC's.

Admitted connections are passed on unchanged to an abstract Unix socket on which the server listens. The peer name of each
connection on that socket maps to its client's address.
"""

import asyncio
import logging
import socket
from collections.abc import Coroutine
from functools import partial
from secrets import token_hex
from typing import Any

from kvatlas.http.connection_shares import Place
from kvatlas.http.counters import HttpCounters
from kvatlas.http.server import Listener
from kvatlas.runtime.background_task import end_tasks
from kvatlas.runtime.rate_limited_log import RateLimitedLog

_ABSTRACT = "unix-abstract:"
_log = logging.getLogger("kvatlas.http")


class BoundedPort:
    """`server_address`: the address on which the server must listen, in gRPC's notation."""

    def __init__(self, listener: Listener) -> None:
        """`listener`: the port, its connection limits and its shares."""
        self._listener = listener
        self._name = f"kvatlas-{token_hex(16)}"
        self.server_address = _ABSTRACT + self._name
        self._made = 0
        self._addresses: dict[str, str] = {}
        self._clients: set[_Client] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self.counters = HttpCounters()
        self._refusals = RateLimitedLog(_log)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Accept connections. The server must already be listening when this is called."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(partial(_Client, self), sock=self._listener.socket)

    async def stop(self) -> None:
        """Close the port and every connection. Stopping twice is fine."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await end_tasks(list(self._connecting))
            for client in list(self._clients):
                client.abort()
        self._listener.close()

    def address_of(self, peer: str) -> str:
        """The address of the client that the server knows by this peer name; empty if the client did not come through this
        port."""
        return self._addresses.get(peer.removeprefix(_ABSTRACT), "")

    def take(self, client: "_Client", address: str) -> str | None:
        """Reserve a place for a new connection. Returns the peer name that the server will see; None if there is no place."""
        shares = self._listener.shares
        if shares.open(client, address) is not Place.FULL:
            shares.close(client)
            self.counters.too_many += 1
            self._refusals.report("connections", shares.describe_refusal(address))
            return None
        self._made += 1
        name = f"{self._name}-{self._made}"
        self._addresses[name] = address
        self._clients.add(client)
        return name

    def release(self, client: "_Client", name: str) -> None:
        """Free the place of a connection that is closed."""
        self._listener.shares.close(client)
        self._clients.discard(client)
        del self._addresses[name]

    def connect(self, client: "_Client", name: str) -> None:
        """Start connecting a client to the server."""
        self._run(self._connect(client, name))

    async def _connect(self, client: "_Client", name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            end.setblocking(False)
            try:
                end.bind(f"\0{name}")
                await loop.sock_connect(end, f"\0{self._name}")
                transport, _ = await loop.create_unix_connection(partial(_End, client.transport), sock=end)
            except BaseException:
                end.close()
                raise
        except OSError as error:  # no descriptor is left, or the server is stopping
            self._refusals.report("server", f"connection of {self._addresses.get(name)} closed: {error}")
            client.abort()
            return
        client.join(transport)

    def _run(self, body: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(body)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)


class _End(asyncio.Protocol):
    """One end of a connection. Whatever arrives is passed to the `other` end, as fast as that end accepts it."""

    def __init__(self, other: asyncio.Transport | None = None) -> None:
        self._other = other

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other.write(data)

    def pause_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other.is_closing():
            self._other.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.close()
        self._other = None


class _Client(_End):
    """The client's end."""

    transport: asyncio.Transport

    def __init__(self, port: BoundedPort) -> None:
        super().__init__()
        self._port = port
        self._name: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._name = self._port.take(self, transport.get_extra_info("peername")[0])
        if self._name is None:
            transport.abort()
        else:
            transport.pause_reading()
            self._port.connect(self, self._name)

    def join(self, server: asyncio.Transport) -> None:
        """Pass everything that arrives to the server's end from now on."""
        if self.transport.is_closing():
            server.abort()
        else:
            self._other = server
            self.transport.resume_reading()

    def abort(self) -> None:
        self.transport.abort()

    def close_idle(self) -> None:
        """Never called: only the server knows whether a connection is idle."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._name is not None:
            self._port.release(self, self._name)
