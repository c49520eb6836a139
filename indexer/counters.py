"""Counters of an indexer process: plain integers, because the hot path adds to them."""

from dataclasses import dataclass, field, fields
from math import isfinite
from typing import Any

from kvatlas.telemetry.distribution import Distribution, counters_to_jsonable


@dataclass(slots=True)
class IndexerCounters:
    """Counts since the replica started. A message is counted each time it is read or applied."""

    # messages read from the stream
    messages_read: int = 0
    readings_started: int = 0
    readings_broken: int = 0
    new_streams: int = 0
    # messages refused before they reach the index, and published to the dead-letter stream
    poison_malformed: int = 0
    poison_version: int = 0
    poison_oversized: int = 0
    poison_scope: int = 0
    poison_incarnation: int = 0
    poison_refused: int = 0
    """valid messages that the index could not apply"""
    poison_wrong_subject: int = 0
    poison_wrong_partition: int = 0
    poison_identity: int = 0
    poison_fleet: int = 0
    dead_letters_dropped: int = 0
    # outcomes of messages in the index
    applied: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    refused: int = 0
    failed_checks: int = 0
    moved: int = 0
    store_errors: int = 0
    store_full: int = 0
    # repair
    snapshots_asked: int = 0
    snapshots_unanswered: int = 0
    snapshots_refused: int = 0
    grants_given: int = 0
    grants_refused: int = 0
    grants_bad: int = 0
    grants_excess: int = 0
    """requests from workers that asked too often; these are never read"""
    records_bad: int = 0
    """fleet records that could not be written"""
    pools_repaired: int = 0
    """how often damaged records of loads and reservations were dropped, with all bookings of their pool"""
    # liveness
    heartbeats: int = 0
    heartbeats_bad: int = 0
    heartbeats_excess: int = 0
    """heartbeats of workers that sent too many; these are never read"""
    heartbeats_refused: int = 0
    """heartbeats of workers or addresses that the publisher's identity does not allow"""
    fleet_writes: int = 0
    workers_lost: int = 0
    workers_retired: int = 0
    workers_too_large: int = 0
    retirements_held: int = 0
    # ownership
    partitions_taken: int = 0
    partitions_given: int = 0
    leases_lost: int = 0
    sweeps: int = 0
    scopes_forgotten: int = 0
    # scrub
    scrubs: int = 0
    scrub_damaged: int = 0
    scrub_strays: int = 0
    scrub_given_up: int = 0
    event_lag: Distribution = field(default_factory=Distribution)
    """time from a message's `ts_us` until it is applied"""
    apply_time: Distribution = field(default_factory=Distribution)

    @property
    def poison(self) -> int:
        """Number of messages refused before they reached the index, for any reason."""
        return sum(getattr(self, one.name) for one in fields(self) if one.name.startswith("poison_"))

    def to_jsonable(self) -> dict[str, Any]:
        bounds, counts = self.event_lag.doublings()
        return {
            **counters_to_jsonable(self),
            "event_lag": {
                "buckets_ms": [bound * 1_000 for bound in bounds],
                "counts": counts,
                "sum_ms": self.event_lag.sum * 1_000,
                "p50_ms": _finite_ms(self.event_lag.quantile(0.5)),
                "p99_ms": _finite_ms(self.event_lag.quantile(0.99)),
            },
        }


def _finite_ms(seconds: float | None) -> float | None:
    return seconds * 1_000 if seconds is not None and isfinite(seconds) else None
