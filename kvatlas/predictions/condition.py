"""The condition of a router: its counts of the last minute, and what may keep it from serving."""

from kvatlas.fleet.records import WireRecord
from kvatlas.validation import Count


class RouterCondition(WireRecord):
    """One router, as it says itself. `sent_us`: its clock.

    Within the last minute: `choices` made, of them `fell_open` without the store's help, of these `without_index` without the
    index; `no_workers`: requests for which none was found; `requests`: those that ended, of them `refused` (no engine took
    them), and `gone` (the client gave up first).

    `descriptors`: open files and connections, of at most `most_descriptors`; 0: not known. `store_us`: the shortest of its last
    round trips to the store in microseconds, 0: not known; `store_is_far`: so far that a choice waits for the index alone, and
    is booked behind the answer.
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
    store_us: Count = 0
    store_is_far: bool = False
