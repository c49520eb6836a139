"""Which connections an HTTP server keeps: a share for each client address, and a reserve for probes.

Idle connections make room for new ones, the one that is idle for longest first.
"""

from enum import Enum
from typing import Generic, Protocol, TypeVar

from kvatlas.addresses import parse_ip

RESERVE = 64
"""Connections above the limit that are answered on probes' paths alone."""
RESERVE_SHARE = 8
"""Of these, for one address."""
NEARLY_FULL = 0.95
"""Share of the connections that are in use."""


class Closable(Protocol):
    def close_idle(self) -> None:
        """Close a connection between two requests."""


C = TypeVar("C", bound=Closable)


class Place(Enum):
    """What a new connection gets."""

    FULL = "any request"
    PROBES = "probes alone"
    NONE = "nothing"


class ConnectionShares(Generic[C]):
    """The open connections of one server. At most `most` of them, and `share` of one address, get any request."""

    def __init__(self, most: int, share: int) -> None:
        self.most = most
        self.share = share
        self._full: dict[C, str] = {}
        self._probes: dict[C, str] = {}
        self._count: dict[tuple[Place, str], int] = {}
        self._idle: dict[C, None] = {}

    def open(self, connection: C, address: str | None) -> Place:
        """`address`: the client's, without its port; None if it has none, as on a Unix socket."""
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
        return Place.NONE

    @property
    def is_nearly_full(self) -> bool:
        """Is there hardly room for another request? Idle connections make room."""
        return len(self._full) - len(self._idle) >= NEARLY_FULL * self.most

    def close(self, connection: C) -> None:
        """It is closed, or about to be. Closing twice is fine."""
        self._idle.pop(connection, None)
        for place, members in ((Place.FULL, self._full), (Place.PROBES, self._probes)):
            if (key := members.pop(connection, None)) is not None:
                self._count[place, key] -= 1
                if not self._count[place, key]:
                    del self._count[place, key]

    def rest(self, connection: C) -> None:
        """It is idle from now on."""
        if connection in self._full:
            self._idle[connection] = None

    def wake(self, connection: C) -> None:
        """It is not idle any more."""
        self._idle.pop(connection, None)

    def _of(self, place: Place, key: str) -> int:
        return self._count.get((place, key), 0)

    def _add(self, members: dict[C, str], place: Place, connection: C, key: str) -> None:
        members[connection] = key
        self._count[place, key] = self._of(place, key) + 1

    def _drop_idle(self, key: str | None) -> None:
        found = next((one for one in self._idle if key is None or self._full[one] == key), None)
        if found is not None:
            self.close(found)
            found.close_idle()


def _network(address: str | None) -> str:
    """A client of IPv6 has a whole /64 to itself; an IPv4 address inside an IPv6 one is the IPv4 one."""
    ip = parse_ip(address or "")
    if ip is None:
        return address or ""
    return str(ip) if ip.version == 4 else f"{int(ip) >> 64:x}::/64"
