"""Counters of requests that an HTTP server refuses."""

from dataclasses import dataclass


@dataclass(slots=True)
class HttpCounters:
    """Refusals: `framing` (not HTTP/1.1, or not exactly one Host), `headers` (too many bytes), `too_long` (the body),
    `too_late` (the headers), `slow` (the body), `too_many` (connections), `denied` (no valid token), `upgrade` (to a
    WebSocket), `unread` (the client does not read the answer)."""

    framing: int = 0
    headers: int = 0
    too_long: int = 0
    too_late: int = 0
    slow: int = 0
    too_many: int = 0
    denied: int = 0
    upgrade: int = 0
    unread: int = 0
