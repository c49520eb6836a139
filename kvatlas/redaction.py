"""Addresses for log lines, errors and status pages, without anything that may be a secret."""

import re

_HOST = r"(?:[A-Za-z0-9_.*-]+|\[[0-9A-Fa-f:.]+\])"
_PLAIN = re.compile(rf"(?:[a-z][a-z0-9+]*://{_HOST}(?::(?:[0-9]{{1,5}}|\*))?(?:/[0-9]{{0,3}})?|{_HOST}:[0-9]{{1,5}})")
"""The scheme, host, port and database number of a URL."""
_LOCAL = re.compile(r"(?:unix|ipc|inproc|file)://[^?@]*")
_PLACE = re.compile(rf"{_HOST}(?::[0-9]{{1,5}})?(?:/[0-9]{{0,3}})?")
_WHOLE = re.compile(
    r"[a-z][a-z0-9+]*://(?:[^\s/@:]*(?::[^\s/@:]*)?@)?(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?"
)
_SCHEME = re.compile(r"[a-z][a-z0-9+]*://", re.IGNORECASE)
_SENTINELS = re.compile(
    r"(rediss?\+sentinel://)(?:([A-Za-z0-9_.-]{0,64}):[^\s/@?]*@)?"
    rf"({_HOST}(?::[0-9]{{1,5}})?(?:,{_HOST}(?::[0-9]{{1,5}})?)*/[A-Za-z0-9_.-]{{1,64}}(?:/[0-9]{{0,3}})?)(\?.*)?"
)
_USER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def redact_url(url: str) -> str:
    """The URL, or several separated by commas, reduced to what can't be a secret: scheme, user, host and port.

    Passwords, tokens (NATS reads a user without a password as a token), query strings and anything that does not look like a
    URL become ***, so that even mistyped URLs can be shown.
    """
    if found := _SENTINELS.fullmatch(url):
        scheme, user, place, query = found.groups()
        return f"{scheme}{'' if user is None else f'{user}:***@'}{place}{'?***' if query else ''}"
    several = [one.strip() for one in url.split(",")]
    # a comma may also be part of a password: in that case, the parts are not URLs, or only some of them have a login
    if len({"@" in one for one in several}) == 1 and all(_WHOLE.fullmatch(one) for one in several):
        return ",".join(map(_redact_one, several))
    return _redact_one(url)


def _redact_one(url: str) -> str:
    rest, question, _ = url.partition("?")
    login, at, place = url.rpartition("@")
    if at and "?" in login:  # the "?" may belong to a password or begin a query: we can't tell
        found = _SCHEME.match(url)
        return f"{found.group() if found else ''}***"
    if at:
        found = _SCHEME.match(login)
        scheme = found.group() if found else ""
        user, colon, _ = login[len(scheme) :].partition(":")
        shown = f"{user}:***" if colon and _USER.fullmatch(user) else "***"
        where = place.partition("?")[0] if _PLACE.fullmatch(place.partition("?")[0]) else "***"
        return f"{scheme}{shown}@{where}"
    if not (_PLAIN.fullmatch(rest) or _LOCAL.fullmatch(rest)):
        place = rest.rpartition("/")[0]
        if _PLAIN.fullmatch(place) and _SCHEME.match(place):
            return f"{place}/***"
        found = _SCHEME.match(rest)
        return f"{found.group() if found else ''}***"
    return f"{rest}?***" if question else rest
