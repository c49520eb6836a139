"""The condition of a router: its counts of the last minute, and what may keep it from serving."""

from kvatlas.fleet.records import WireRecord
from kvatlas.validation import Count


class RouterCondition(WireRecord):
    """One router, as it says itself. `sent_us`: its clock. Within the last minute: `choices` made, of them `fell_open` without
    the store's help; `no_workers`: requests for which none was found; `requests`: those that ended, of them `refused` (no
    engine took them), and `gone` (the client gave up first). `descriptors`: open files and connections, of at most
    `most_descriptors`; 0: not known. `proves_tenants`: does each request prove its tenant there, or do all count as one? None:
    it serves its own program alone, or is older than this field. `limits_shared`: do clients' limits a minute hold for all
    routers of the fleet, as the store takes part? None: no client has limits there."""

    sent_us: Count
    choices: Count = 0
    fell_open: Count = 0
    no_workers: Count = 0
    requests: Count = 0
    refused: Count = 0
    gone: Count = 0
    descriptors: Count = 0
    most_descriptors: Count = 0
    proves_tenants: bool | None = None
    limits_shared: bool | None = None
