"""Addresses of engines: which URLs are valid, and allowlists of hosts and networks."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from kvatlas.errors import InvalidValue

Ip = IPv4Address | IPv6Address

METADATA = frozenset(
    ip_address(text) for text in ("169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192")
)
"""Metadata services, which give out a machine's credentials (AWS, GCP and Azure; AWS over IPv6; Alibaba; Oracle)."""
_SHARED = ip_network("100.64.0.0/10")
"""Shared address space (RFC 6598). Some clouds put pods there, and `is_private` does not include it."""
_DEFAULT_PORTS = {"http": 80, "https": 443}


@lru_cache(maxsize=16_384)
def check_origin(url: str) -> str:
    """Return the URL with its scheme in lower case, if it is http or https with a host, an optional port and nothing else.

    Raises InvalidValue without quoting the URL, which may contain a password."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in _DEFAULT_PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if (
        not good
        or "@" in parts.netloc
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or not url.isprintable()
    ):
        raise InvalidValue("the engine's address must be a URL of scheme, host and port alone")
    return f"{parts.scheme}://{parts.netloc}"


@lru_cache(maxsize=16_384)
def host_and_port(origin: str) -> tuple[str, int]:
    """Host and port of an origin. Raises InvalidValue for any other URL."""
    parts = urlsplit(check_origin(origin))
    return parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]


def parse_ip(host: str) -> Ip | None:
    """Parse a literal IP address. Returns None for a host name. An IPv4-mapped IPv6 address becomes the IPv4 address."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def is_loopback(host: str) -> bool:
    """True if an address to listen on is a loopback address."""
    own = parse_ip(host)
    return own.is_loopback if own is not None else host == "localhost"


def is_never_an_engine(ip: Ip) -> bool:
    """True for link-local, multicast, unspecified and cloud metadata addresses."""
    return ip.is_link_local or ip.is_multicast or ip.is_unspecified or ip in METADATA


def is_private(ip: Ip) -> bool:
    """True for an address in a private network, except for those of this machine."""
    return not ip.is_loopback and (ip.is_private or (ip.version == 4 and ip in _SHARED))


@dataclass(frozen=True, slots=True)
class _Entry:
    network: IPv4Network | IPv6Network | None
    name: str
    port: int | None


@dataclass(frozen=True, slots=True)
class AddressList:
    """Networks (`10.1.0.0/16`), addresses and names (`*.engines.svc`), each with an optional port (`[fd00::1]:8000`)."""

    entries: tuple[_Entry, ...]

    @classmethod
    def parse(cls, texts: tuple[str, ...]) -> "AddressList":
        """Parse the entries. Raises InvalidValue, quoting the bad one."""
        return cls(tuple(_parse_entry(text) for text in texts))

    def allows(self, host: str, port: int, ip: Ip | None = None) -> bool:
        """True if the host is in the list, by name or by address. `ip`: the address that its name resolves to."""
        if not self.entries:
            return False
        ip = ip or parse_ip(host)
        name = host.lower().rstrip(".")
        for entry in self.entries:
            if entry.port not in (None, port):
                continue
            if entry.network is not None:
                if ip is not None and ip.version == entry.network.version and ip in entry.network:
                    return True
            elif fnmatchcase(name, entry.name):
                return True
        return False


def _parse_entry(text: str) -> _Entry:
    host, port = text.strip(), None
    head, colon, tail = host.rpartition(":")
    if colon and tail.isdecimal() and len(tail) <= 5 and (":" not in head or head.endswith("]")):
        host, port = head, int(tail)
    host = host.removeprefix("[").removesuffix("]").lower().rstrip(".")
    try:
        return _Entry(ip_network(host, strict=False), "", port)
    except ValueError:
        pass
    if not host or not all(c.isalnum() or c in "-_.*" for c in host):
        raise InvalidValue(f"address {text!r:.80}; expected a network, an address or a name, optionally with a port")
    return _Entry(None, host, port)
