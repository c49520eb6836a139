"""The condition of a router: its counts of the last minute, and limits that may prevent it from serving."""

from kvatlas.fleet.records import WireRecord
from kvatlas.validation import Count


class RouterCondition(WireRecord):
    """What a router reports about itself. `sent_us`: when it was sent, by the router's clock.

    Within the last minute: `choices`: how many were made; `fell_open`: how many of them without the store; `without_index`: how
    many of the latter lacked the index; `no_workers`: choices for which no worker was found, of which several may belong to one
    request; `requests`: those that ended, including `refused` (no engine took them) and `gone` (the client gave up before the
    end).

    `descriptors`: the number of open files and connections, out of at most `most_descriptors`; 0: unknown. `proves_tenants`:
    True if each request to this router proves its tenant, False if all requests count as those of one tenant; None: the router
    only serves the program that it is part of, or is older than this field. `limits_shared`: True if clients' limits per minute
    apply to all routers of the fleet together, because the store takes part; None: clients have no limits there. `store_us`:
    the shortest of its last round trips to the store, in microseconds; 0: unknown. `store_is_far`: the store is so far away
    that a choice waits only for the index, and is booked afterwards.
    """

    sent_us: Count
    choices: Count = 0
    fell_open: Count = 0
    without_index: Count = 0
    no_workers: Count = 0
    requests: Count = 0
    refused: Count = 0
    gone: Count = 0
    descriptors: Count = 0
    most_descriptors: Count = 0
    proves_tenants: bool | None = None
    store_us: Count = 0
    store_is_far: bool = False
    limits_shared: bool | None = None
