"""The condition of a router: its counts of the last minute, and limits that may keep it from serving."""

from kvatlas.fleet.records import WireRecord
from kvatlas.validation import Count


class RouterCondition(WireRecord):
    """A router's report about itself. `sent_us`: its clock.

    Within the last minute: `choices` made, `fell_open` of them without the store, `without_index` of these without the index;
    `no_workers`: choices for which no worker was found, perhaps several of one request; `requests`: those that ended,
    including `refused` (no engine took them) and `gone` (the client gave up first).

    `descriptors`: open files and connections, of at most `most_descriptors`; 0: unknown. `proves_tenants`: True if each
    request proves its tenant there, False if all count as one tenant's; None: the router serves its own program alone, or is
    older than this field. `limits_shared`: True if clients' limits per minute hold for all routers of the fleet, because the
    store takes part; None: no client has limits there. `store_us`: the shortest of its last round trips to the store in
    microseconds; 0: unknown. `store_is_far`: the store is so far away that a choice waits only for the index, and is booked
    afterwards.
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
