"""A URL that names Sentinels and the primary that they watch."""

from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, urlsplit

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
FORM = "redis+sentinel://USER:PASSWORD@HOST:26379,HOST:26379/NAME, with the name of the primary that Sentinel watches"
_PORT = 26_379


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    """`redis+sentinel://user:password@host:port,host:port/name/database`; `rediss+sentinel`: TLS to Sentinels and servers.

    The login is for the servers; `?sentinel_username=...&sentinel_password=...` is for the Sentinels.
    """

    tls: bool
    sentinels: tuple[tuple[str, int], ...]
    service: str
    database: int = 0
    username: str | None = None
    password: str | None = None
    sentinel_username: str | None = None
    sentinel_password: str | None = None

    @classmethod
    def parse(cls, url: str) -> "SentinelUrl":
        """Parse the URL. Raises ValueError with a text that does not quote any part of the URL."""
        scheme, _, rest = url.partition("://")
        authority, slash, path = rest.partition("/")
        login, _, places = authority.rpartition("@")
        parts = urlsplit(f"{scheme}://{slash}{path}")  # leave out the hosts: urlsplit can't read several IPv6 addresses
        user, _, password = login.partition(":")
        service, _, database = parts.path.strip("/").partition("/")
        options = {name: values[0] for name, values in parse_qs(parts.query).items()}
        known = {"sentinel_username", "sentinel_password"}
        if parts.scheme not in SENTINEL_SCHEMES or not service or not options.keys() <= known:
            raise ValueError(f"expected {FORM}")
        if database and not database.isdecimal():
            raise ValueError(f"expected {FORM}, optionally followed by a database number")
        return cls(
            parts.scheme == "rediss+sentinel",
            tuple(_place(one.strip()) for one in places.split(",")),
            unquote(service),
            int(database or 0),
            unquote(user) or None,
            unquote(password) or None,
            options.get("sentinel_username"),
            options.get("sentinel_password"),
        )


def _place(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"expected {FORM}; each port from 1 to 65535") from error
    if not host:
        raise ValueError(f"expected {FORM}")
    return host, port or _PORT
