"""Limits the connections to an HTTP server: there is a share for each client address, and a reserve for probes.

Idle connections make way for new ones; those that have been idle the longest go first.
"""

from enum import Enum
from typing import Generic, Protocol, TypeVar

from kvatlas.addresses import parse_ip

RESERVE = 64
"""Connections above the limit, which may only request the probes' paths. Up to the same number of further connections are
refused with an answer."""
RESERVE_SHARE = 8
"""Maximum number of these connections per address."""
NEARLY_FULL = 0.95
"""The server is nearly full if at least this share of the connections is in use."""


class Closable(Protocol):
    def close_idle(self) -> None:
        """Close a connection that is between two requests."""


C = TypeVar("C", bound=Closable)


class Place(Enum):
    """The requests that a new connection may make."""

    FULL = "any request"
    PROBES = "probes alone"
    NONE = "nothing, and a refusal says so"
    DROPPED = "nothing"


class ConnectionShares(Generic[C]):
    """The open connections of one server. At most `most` of them, and `share` per address, may make any request."""

    def __init__(self, most: int, share: int) -> None:
        self.most = most
        self.share = share
        self._full: dict[C, str] = {}
        self._probes: dict[C, str] = {}
        self._refused: set[C] = set()
        self._count: dict[tuple[Place, str], int] = {}
        self._idle: dict[C, None] = {}
        self._idle_of: dict[str, dict[C, None]] = {}
        """The idle connections of each address; as in `_idle`, those that have been idle the longest come first."""

    def open(self, connection: C, address: str | None) -> Place:
        """Add a connection. `address`: the client's address without its port; None if it has none, as on a Unix socket."""
        key = _network(address)
        if self._of(Place.FULL, key) >= self.share:
            self._drop_idle(key)
        elif len(self._full) >= self.most:
            self._drop_idle(None)
        if len(self._full) < self.most and self._of(Place.FULL, key) < self.share:
            self._add(self._full, Place.FULL, connection, key)
            return Place.FULL
        if len(self._probes) < RESERVE and self._of(Place.PROBES, key) < RESERVE_SHARE:
            self._add(self._probes, Place.PROBES, connection, key)
            return Place.PROBES
        if len(self._refused) < RESERVE:  # a client may take a while to read a refusal, while others arrive
            self._refused.add(connection)
            return Place.NONE
        return Place.DROPPED

    def describe_refusal(self, address: str) -> str:
        """The reason why a connection was given no place, as one line."""
        most = f"{self.most} in all (--http-connections), {self.share} of one address"
        return f"connection of {address} refused: the most that are allowed are {most}"

    @property
    def is_nearly_full(self) -> bool:
        """True if there is hardly any room left for new connections. Idle ones don't count, because they make way."""
        return len(self._full) - len(self._idle) >= NEARLY_FULL * self.most

    def close(self, connection: C) -> None:
        """Remove a connection that is closed or is about to be closed. Removing it twice is fine."""
        self.wake(connection)
        self._refused.discard(connection)
        for place, members in ((Place.FULL, self._full), (Place.PROBES, self._probes)):
            if (key := members.pop(connection, None)) is not None:
                self._count[place, key] -= 1
                if not self._count[place, key]:
                    del self._count[place, key]

    def rest(self, connection: C) -> None:
        """Note that a connection is idle from now on."""
        if (key := self._full.get(connection)) is not None:
            self._idle[connection] = self._idle_of.setdefault(key, {})[connection] = None

    def wake(self, connection: C) -> None:
        """Note that a connection is no longer idle."""
        if connection in self._idle:
            del self._idle[connection]
            of_address = self._idle_of[key := self._full[connection]]
            del of_address[connection]
            if not of_address:
                del self._idle_of[key]

    def _of(self, place: Place, key: str) -> int:
        return self._count.get((place, key), 0)

    def _add(self, members: dict[C, str], place: Place, connection: C, key: str) -> None:
        members[connection] = key
        self._count[place, key] = self._of(place, key) + 1

    def _drop_idle(self, key: str | None) -> None:
        found = next(iter(self._idle if key is None else self._idle_of.get(key, ())), None)
        if found is not None:
            self.close(found)
            found.close_idle()


def _network(address: str | None) -> str:
    """The key of a client's share: for IPv6, a whole /64. An IPv4-mapped IPv6 address counts as IPv4."""
    ip = parse_ip(address or "")
    if ip is None:
        return address or ""
    return str(ip) if ip.version == 4 else f"{int(ip) >> 64:x}::/64"
