"""`kvatlas doctor`: checks the set-up of an installation and that every part of it is alive.

    report.py       a finding: its level, one line, and what to do
    examination.py  runs all checks, in order
    service_answer.py  checks for each model whether a request would be served well now
    fleets.py       checks that the store and the stream belong to the same fleet
    store_facts.py  reads the store's servers          store.py  judges them
    heartbeats.py   listens to publishers
    stream.py       NATS and the event stream
    indexers.py     replicas and their leases
    workers.py      fleet records, heartbeats and the index's worker records, compared
    sidecars.py     publishers' status pages
    pools.py        workers of one model, compared
    routers.py      routers' reports: predicted and actual cached tokens, tenants that no worker has
    clocks.py       clock differences
    request.py      follows one prompt from its scope to the blocks that each worker holds

Each check reads first and then judges; judging takes values and returns findings.
"""

from kvatlas_cli.doctor.examination import examine
from kvatlas_cli.doctor.report import Finding, Level
from kvatlas_cli.doctor.request import follow_request, read_request

__all__ = ["Finding", "Level", "examine", "follow_request", "read_request"]
