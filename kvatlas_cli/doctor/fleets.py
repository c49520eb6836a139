"""Checks that the store and the event stream belong to the same fleet."""

from collections.abc import Iterator, Mapping, Sequence

from kvatlas.fleet.fleet_identity import FleetIdentity
from kvatlas_cli.doctor.finding import Finding, Level, join_names


def judge_fleet(
    stored: FleetIdentity | None,
    streams: str | None,
    nats: str,
    store: str,
    others: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Finding]:
    """Judge whether everything belongs to one fleet. `stored`: the fleet in the store; `streams`: the event stream's fleet;
    None: not set. `others`: workers of other fleets that were heard, by fleet."""
    if stored is not None and streams is not None and stored.fleet != streams:
        line = f"{nats} belongs to fleet {streams}, and {store} to fleet {stored.fleet}"
        advice = "give each fleet its own NATS (or account); is this the --redis-url of the indexers on this NATS?"
        yield Finding("fleet", Level.ERROR, line, advice)
    for fleet_id, ids in (others or {}).items():
        line = (
            f"publishers of another fleet, {fleet_id}, use {nats}; the indexers ignore their workers: {join_names(ids)}"
        )
        yield Finding("fleet", Level.ERROR, line, "give each fleet its own NATS (or account)")
    if stored is not None and streams in (None, stored.fleet):
        yield Finding("fleet", Level.OK, f"fleet {stored.fleet}")
