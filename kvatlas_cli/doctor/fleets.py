"""The fleet: are the store and the event stream of the same one?"""

from collections.abc import Iterator

from kvatlas.fleet_store.fleet_identity import FleetIdentity
from kvatlas_cli.doctor.report import Finding, Level


def judge_fleet(stored: FleetIdentity | None, streams: str | None, nats: str, store: str) -> Iterator[Finding]:
    """`stored`: what the store says; `streams`: the fleet of the event stream; None: not said."""
    if stored is not None and streams is not None and stored.fleet != streams:
        line = f"{nats} is of fleet {streams}, and {store} of fleet {stored.fleet}"
        advice = (
            "give each fleet a NATS (or an account) of its own; is this the --redis-url of the indexers on this NATS?"
        )
        yield Finding("fleet", Level.ERROR, line, advice)
    elif stored is not None:
        yield Finding("fleet", Level.OK, f"fleet {stored.fleet}")
