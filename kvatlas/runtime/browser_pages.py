"""Calls that a page makes a browser send to a server on loopback, on the machine of the person who looks at the page.

Such a server has no users: who reaches it is trusted, but any page in a browser there reaches it too. What the page may send
needs no permission (a POST that is not JSON), and it may read the answers if its own name leads to 127.0.0.1 (DNS rebinding).
"""

from collections.abc import Mapping

from kvatlas.addresses import parse_ip

_OPERATORS = frozenset({"/", "/clear", "/events", "/metrics", "/status"})
_OPERATORS_PREFIX = "/kvatlas/"
_OWN_SITES = (b"same-origin", b"none")


def why_foreign(method: str, path: str, headers: Mapping[bytes, bytes]) -> str:
    """Why an operators' call is not served, in one line; empty if it is. `path`: decoded. No page of another site sends an
    `Authorization`."""
    path = path.rstrip()  # routes ignore a line end
    if not (path in _OPERATORS or path.startswith(_OPERATORS_PREFIX)) or b"authorization" in headers:
        return ""
    host = headers.get(b"host", b"")
    if not _is_our_own(host.decode("latin-1")):
        named = host[:80].decode("latin-1")
        return f"Host is {named!r}, but this server is on loopback: ask for localhost, also in a proxy before it"
    if method == "POST" and not headers.get(b"content-type", b"").lower().startswith(b"application/json"):
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        is_own = site in _OWN_SITES if site is not None else origin is None or origin.partition(b"://")[2] == host
        if not is_own:
            return "the request comes from a page of another site; send JSON (Content-Type: application/json)"
    return ""


def _is_our_own(host: str) -> bool:
    """True for an address, or a name that no one else's DNS answers for."""
    name = host.rpartition("]")[0].removeprefix("[") or host.partition(":")[0]
    return parse_ip(name) is not None or "." not in name or name.endswith(".localhost")
