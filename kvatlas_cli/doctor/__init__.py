"""`kvatlas doctor`: checks the set-up of an installation and that every part of it is alive.

    finding.py      a finding: one line, its level, what to do
    examination.py  runs every check, in order
    store_facts.py  reads the store's servers          store.py  judges them
    stream.py       NATS and the event stream
    indexers.py     replicas and their leases
    workers.py      fleet records, heartbeats and the index's worker records, compared
    routers.py      routers' counts of predicted and reported cached tokens
    clocks.py       clock differences

Each reads first and judges afterwards; judging takes values and returns findings.
"""

from kvatlas_cli.doctor.examination import examine
from kvatlas_cli.doctor.report import Finding, Level

__all__ = ["Finding", "Level", "examine"]
