"""`kvatlas doctor`: checks the set-up of an installation and that every part of it is alive.

    report.py       a finding: one line, its level, what to do
    examination.py  runs every check, in order
    service_answer.py  would a request be served well now, for each model?
    fleets.py       is the store of the same fleet as the stream?
    store_facts.py  reads the store's servers          store.py  judges them
    heartbeats.py   listens to publishers
    stream.py       NATS and the event stream
    indexers.py     replicas and their leases
    workers.py      fleet records, heartbeats and the index's worker records, compared
    sidecars.py     publishers' status pages
    pools.py        workers of one model, compared
    routers.py      what routers report: predicted and reported cached tokens, tenants that no worker has
    clocks.py       clock differences
    request.py      one prompt, followed from its scope to what each worker holds

Each reads first and judges afterwards; judging takes values and returns findings.
"""

from kvatlas_cli.doctor.examination import examine
from kvatlas_cli.doctor.report import Finding, Level
from kvatlas_cli.doctor.request import follow_request, read_request

__all__ = ["Finding", "Level", "examine", "follow_request", "read_request"]
