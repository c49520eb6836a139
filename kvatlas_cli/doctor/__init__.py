"""`kvatlas doctor`: is this installation set up as it should be, and does every part of it live?

    finding.py      what is said: one line, how bad it is, what to do
    examination.py  asks everything, in order
    store_facts.py  what the store's servers say of themselves     store.py     what is wrong with that
    bus.py          NATS and the event stream
    indexers.py     replicas and their leases
    workers.py      fleet records, heartbeats and the index's records of workers, side by side
    routers.py      what routers count of answers
    clocks.py       whose clocks differ

Each reads first and judges then; judging takes values and returns findings.
"""

from kvatlas_cli.doctor.examination import examine
from kvatlas_cli.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
