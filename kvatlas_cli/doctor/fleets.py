"""The fleet: are the store and the event stream of the same one?"""

from collections.abc import Iterator, Mapping, Sequence

from kvatlas.fleet.fleet_identity import FleetIdentity
from kvatlas_cli.doctor.report import Finding, Level, join_names


def judge_fleet(
    stored: FleetIdentity | None,
    streams: str | None,
    nats: str,
    store: str,
    others: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Finding]:
    """`stored`: what the store says; `streams`: the fleet of the event stream; None: not said. `others`: workers of
    other fleets that are heard, by fleet."""
    if stored is not None and streams is not None and stored.fleet != streams:
        line = f"{nats} is of fleet {streams}, and {store} of fleet {stored.fleet}"
        advice = (
            "give each fleet a NATS (or an account) of its own; is this the --redis-url of the indexers on this NATS?"
        )
        yield Finding("fleet", Level.ERROR, line, advice)
    for fleet_id, ids in (others or {}).items():
        line = (
            f"publishers of another fleet, {fleet_id}, use {nats}; the indexers ignore their workers: {join_names(ids)}"
        )
        yield Finding("fleet", Level.ERROR, line, "give each fleet a NATS (or an account) of its own")
    if stored is not None and streams in (None, stored.fleet):
        yield Finding("fleet", Level.OK, f"fleet {stored.fleet}")
