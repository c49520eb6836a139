"""Which addresses the proxy connects to, and which of them get clients' credentials.

A worker's address is what its publisher advertised. Checked is the address that a connection is made to, not only the
name: what a name stands for may change between two looks.
"""

import socket
from collections.abc import Iterable
from time import monotonic

import anyio
import httpx

from kvatlas.addresses import AddressList, Ip, host_and_port, is_never_an_engine, is_private, parse_ip
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord

RESOLVED_S = 2.0
"""How long a name's address is used."""
MAX_RESOLVED = 10_000


class AddressPolicy:
    """`allowed`: the only addresses to connect to; without it those that indexers vouch for, because the publisher's identity
    names them, and private ones; loopback ones only if the proxy itself is on loopback (`near`). Never link-local ones.
    `credentials_to`: addresses that get clients' credentials."""

    def __init__(self, allowed: tuple[str, ...] = (), credentials_to: tuple[str, ...] = (), *, near: bool) -> None:
        """Raises InvalidValue for an entry that is no address."""
        self._allowed = AddressList.parse(allowed) if allowed else None
        self._credentials_to = AddressList.parse(credentials_to)
        self._near = near
        self._vouched: frozenset[tuple[str, int]] = frozenset()

    def update(self, records: Iterable[FleetRecord]) -> None:
        """The fleet's records as they are now."""
        urls = {record.endpoint.url for record in records if record.vouched}
        self._vouched = frozenset(host_and_port(url) for url in urls if url)

    def allows(self, host: str, port: int, ip: Ip) -> bool:
        """May a connection be made to this address, which the host stands for?"""
        if is_never_an_engine(ip):
            return False
        if self._allowed is not None:
            return self._allowed.allows(host, port, ip)
        return (host, port) in self._vouched or (self._near if ip.is_loopback else is_private(ip))

    def sends_credentials(self, url: str) -> bool:
        """Does the engine at this address get the client's credentials?"""
        try:
            host, port = host_and_port(url)
        except InvalidValue:
            return False
        return self._credentials_to.allows(host, port)


class CheckedTransport(httpx.AsyncBaseTransport):
    """Connects to addresses that the policy allows; raises httpx.ConnectError for others."""

    def __init__(self, policy: AddressPolicy, inner: httpx.AsyncBaseTransport) -> None:
        self._policy = policy
        self._inner = inner
        self._resolved: dict[tuple[str, int], tuple[float, list[Ip]]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
        ip = parse_ip(host)
        addresses = [ip] if ip is not None else await self._resolve(host, port)
        allowed = [one for one in addresses if self._policy.allows(host, port, one)]
        if not allowed:
            line = f"{host}:{port} is no address to send requests to (--engine-addresses)"
            raise httpx.ConnectError(line, request=request)
        if ip is None:
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = request.url.copy_with(host=str(allowed[0]))  # its Host header stays
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def _resolve(self, host: str, port: int) -> list[Ip]:
        known = self._resolved.get((host, port))
        if known is not None and monotonic() < known[0]:
            return known[1]
        try:
            found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpx.ConnectError(f"{host}: {error.strerror or error}") from error
        ips = [one for info in found if (one := parse_ip(str(info[4][0]))) is not None]
        if len(self._resolved) >= MAX_RESOLVED:
            self._resolved.clear()
        self._resolved[host, port] = monotonic() + RESOLVED_S, ips
        return ips
