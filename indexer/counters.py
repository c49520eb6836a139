"""What an indexer replica counts: plain integers, because the hot path adds to them."""

from bisect import bisect_left
from dataclasses import asdict, dataclass, field, fields
from typing import Any

LAG_BUCKETS_MS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0, 1_000.0, 5_000.0, 30_000.0, 300_000.0)


@dataclass(slots=True)
class LagHistogram:
    """Milliseconds from a message's `ts_us` until it is applied. The last count is of lags above every bucket."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LAG_BUCKETS_MS) + 1))
    sum_ms: float = 0.0

    def add(self, lag_ms: float, messages: int) -> None:
        self.counts[bisect_left(LAG_BUCKETS_MS, lag_ms)] += messages
        self.sum_ms += max(0.0, lag_ms) * messages

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile_ms(self, q: float) -> float | None:
        """The upper bound of the bucket that holds the quantile; None before the first message."""
        total = self.count
        if not total:
            return None
        seen = 0
        for bound, count in zip((*LAG_BUCKETS_MS, float("inf")), self.counts, strict=True):
            seen += count
            if seen >= q * total:
                return bound
        return float("inf")


@dataclass(slots=True)
class IndexerCounters:
    """Since the replica started. A message counts each time it is read or applied."""

    # read from the stream
    messages_read: int = 0
    bytes_read: int = 0
    readings_started: int = 0
    readings_broken: int = 0
    new_streams: int = 0
    # refused before the index, and published to the dead-letter stream
    poison_malformed: int = 0
    poison_version: int = 0
    poison_oversized: int = 0
    poison_scope: int = 0
    poison_incarnation: int = 0
    poison_refused: int = 0
    """valid by themselves; the index could not take them"""
    poison_wrong_subject: int = 0
    poison_wrong_partition: int = 0
    poison_identity: int = 0
    dead_letters_dropped: int = 0
    # outcomes of messages in the index
    calls: int = 0
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
    records_bad: int = 0
    """fleet records that could not be written"""
    # liveness
    heartbeats: int = 0
    heartbeats_bad: int = 0
    heartbeats_refused: int = 0
    """of workers or addresses that the publisher's identity does not allow"""
    fleet_writes: int = 0
    workers_lost: int = 0
    workers_retired: int = 0
    retirements_held: int = 0
    # ownership
    partitions_taken: int = 0
    partitions_given: int = 0
    leases_lost: int = 0
    sweeps: int = 0
    scopes_forgotten: int = 0
    # scrub
    scrubs: int = 0
    scrub_checked: int = 0
    scrub_damaged: int = 0
    scrub_strays: int = 0
    scrub_given_up: int = 0
    event_lag: LagHistogram = field(default_factory=LagHistogram)

    @property
    def poison(self) -> int:
        """Messages refused before the index, for any reason."""
        return sum(getattr(self, one.name) for one in fields(self) if one.name.startswith("poison_"))

    def to_jsonable(self) -> dict[str, Any]:
        counted = asdict(self)
        lag = counted.pop("event_lag")
        return {
            **counted,
            "event_lag": {
                "buckets_ms": list(LAG_BUCKETS_MS),
                **lag,
                "p50_ms": _finite(self.event_lag.quantile_ms(0.5)),
                "p99_ms": _finite(self.event_lag.quantile_ms(0.99)),
            },
        }


def _finite(value: float | None) -> float | None:
    return value if value is not None and value != float("inf") else None
