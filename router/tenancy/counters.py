"""The counters of tenancy."""

from dataclasses import dataclass


@dataclass(slots=True)
class TenancyCounters:
    """Plain integers since the router started. Requests: `proven`, `unproven` (refused: no valid credentials), `foreign`
    (refused: they name another client's tenant), `over_requests`, `over_tokens` (refused by a limit) and `too_long` (refused
    by the client's own body limit)."""

    proven: int = 0
    unproven: int = 0
    foreign: int = 0
    over_requests: int = 0
    over_tokens: int = 0
    too_long: int = 0
