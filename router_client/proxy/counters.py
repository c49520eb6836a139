"""The counters of the proxy."""

from dataclasses import dataclass


@dataclass(slots=True)
class ProxyCounters:
    """Plain integers since the proxy started.

    `requests`: completions and chats received. Of these `answered` (by an engine, whatever its status), `gave_up` (no
    worker left), `gone` (the client went away first) and `broken` (the engine went away in mid-answer). `refused` and
    `unreachable`: tries that failed because the engine was full or did not answer. `untokenized`: routed by load alone.
    `shed`: refused because every engine would miss the SLO by far. `sent`: tries sent to an engine; `wait_us`: from a
    request's arrival to that, summed over tries. `held`, `held_done`, `held_expired`: see
    `router_client.held_bookings.HeldCounters`.
    """

    requests: int = 0
    answered: int = 0
    gave_up: int = 0
    gone: int = 0
    broken: int = 0
    refused: int = 0
    unreachable: int = 0
    untokenized: int = 0
    shed: int = 0
    sent: int = 0
    wait_us: int = 0
    held: int = 0
    held_done: int = 0
    held_expired: int = 0
