"""Decides which addresses the proxy connects to, and which of them get clients' credentials.

A worker's address is what its publisher advertised. We check the resolved address, not just the name: DNS may change between
check and connect.
"""

from collections.abc import Iterable

from kvatlas.addresses import AddressList, Ip, host_and_port, is_never_an_engine, is_private
from kvatlas.engine_access import EngineAccess
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord


class AddressPolicy:
    """`allowed`: the only addresses to connect to. If not given, connections may go to private addresses, to addresses that
    indexers vouch for because the publisher's identity names them and, only if the proxy itself is on loopback (`near`), to
    loopback. Link-local addresses are never allowed. `credentials_to`: addresses that get clients' credentials. `access`: keys
    and certificate authorities for our own calls."""

    def __init__(
        self,
        allowed: tuple[str, ...] = (),
        credentials_to: tuple[str, ...] = (),
        *,
        near: bool,
        access: EngineAccess | None = None,
    ) -> None:
        """Raises InvalidValue for an entry that is not an address."""
        self.access = access or EngineAccess()
        self._workers: dict[str, str] = {}
        self._allowed = AddressList.parse(allowed) if allowed else None
        self._credentials_to = AddressList.parse(credentials_to)
        self._near = near
        self._vouched: frozenset[tuple[str, int]] = frozenset()

    def update(self, records: Iterable[FleetRecord]) -> None:
        """Replace the fleet's records."""
        listed = [record for record in records if record.endpoint.url]
        self._vouched = frozenset(host_and_port(record.endpoint.url) for record in listed if record.vouched)
        if self.access.keys:
            self._workers = {record.endpoint.url: record.endpoint.id for record in listed}

    def allows(self, host: str, port: int, ip: Ip) -> bool:
        """True if a connection to `ip`, to which the host resolved, is allowed."""
        if is_never_an_engine(ip):
            return False
        if self._allowed is not None:
            return self._allowed.allows(host, port, ip)
        return (host, port) in self._vouched or (self._near if ip.is_loopback else is_private(ip))

    def own_key(self, origin: str) -> str | None:
        """The API key that our own calls to this engine carry."""
        return self.access.key_of(self._workers.get(origin, ""))

    def sends_credentials(self, url: str) -> bool:
        """True if the engine at this address gets clients' credentials."""
        try:
            host, port = host_and_port(url)
        except InvalidValue:
            return False
        return self._credentials_to.allows(host, port)
