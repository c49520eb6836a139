"""What the proxy counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class ProxyCounters:
    """Plain integers since the proxy began.

    `requests`: for which a worker was to be found. Of these `answered` (by an engine, whatever its status), `gave_up` (no
    worker left), `gone` (the client went away first) and `broken` (the engine went away in mid-answer). `refused` and
    `unreachable`: tries that ended with another worker, because the engine was full or did not answer. `untokenized`:
    routed by load alone. `shed`: refused because every engine would miss the SLO by far. `wait_us`: from a request's
    arrival to its being sent to an engine, summed over tries.
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
