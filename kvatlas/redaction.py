"""Addresses in log lines, errors and status pages, without anything that may be a secret."""

import re

_PLAIN = re.compile(
    r"(?:[a-z][a-z0-9+]*://)?(?:[A-Za-z0-9_.*-]+|\[[0-9A-Fa-f:.]+\])(?::(?:[0-9]{1,5}|\*))?(?:/[0-9]{0,3})?"
)
"""Scheme, host, port and a database's number."""
_LOCAL = re.compile(r"(?:unix|ipc|inproc|file)://[^?@]*")
_SCHEME = re.compile(r"[a-z][a-z0-9+]*://", re.IGNORECASE)
_USER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def redact_url(url: str) -> str:
    """The URL, or several separated by commas, with only what can't be a secret: scheme, user, host and port.

    Passwords, tokens (a user without a password is one to NATS), query strings and whatever has not the form of a URL
    become ***, so mistyped URLs may be shown too.
    """
    return ",".join(_redact_one(one.strip()) for one in url.split(",")) if _PLAIN.search(url) else "***"


def _redact_one(url: str) -> str:
    rest, question, _ = url.partition("?")
    login, at, place = url.rpartition("@")
    if at:
        found = _SCHEME.match(login)
        scheme = found.group() if found else ""
        user, colon, _ = login[len(scheme) :].partition(":")
        shown = f"{user}:***" if colon and _USER.fullmatch(user) else "***"
        return f"{scheme}{shown}@{_redact_one(place)}"
    if not (_PLAIN.fullmatch(rest) or _LOCAL.fullmatch(rest)):
        place = rest.rpartition("/")[0]
        if _PLAIN.fullmatch(place) and _SCHEME.match(place):
            return f"{place}/***"
        found = _SCHEME.match(rest)
        return f"{found.group() if found else ''}***"
    return f"{rest}?***" if question else rest
