"""A publisher's counters: plain integers, because the hot path adds to them. Telemetry reads them on request."""

from dataclasses import asdict, dataclass

from kvatlas.blocks.residency import TierBlocks
from kvatlas.fleet.records import EngineState


@dataclass(slots=True)
class PublisherCounters:
    """Counters of one worker since its publisher started. The ledger's own are in `Ledger.counters`."""

    # from the engine
    engine_batches: int = 0
    engine_events: int = 0
    skipped_events: int = 0
    """events that could not be decoded or indexed, in otherwise usable batches"""
    poison: int = 0
    """payloads that could not be decoded at all (malformed, oversized, foreign); each is kept as a dead letter"""
    poison_malformed: int = 0
    poison_oversized: int = 0
    poison_frames: int = 0
    dead_letters_dropped: int = 0
    # the engine's feed
    feed_gaps: int = 0
    feed_gaps_filled: int = 0
    feed_duplicates: int = 0
    feed_replays: int = 0
    feed_replays_failed: int = 0
    feed_restarts: int = 0
    feed_started_over: int = 0
    """how often all known blocks were dropped after a gap or a restart"""
    feed_lost: int = 0
    """batches that could not be decoded, fully or in part, and may have removed blocks"""
    folds_failed: int = 0
    """batches that the ledger could not fold, so all known blocks were dropped"""
    feed_unheard: int = 0
    """batches ignored because too many earlier ones were lost"""
    event_gaps: int = 0
    """gaps in the event numbers (open event forms)"""
    event_restarts: int = 0
    event_duplicates: int = 0
    # published to the index
    blocks_stored: int = 0
    blocks_removed: int = 0
    clears: int = 0
    checkpoints: int = 0
    snapshots: int = 0
    snapshot_blocks: int = 0
    overflows: int = 0
    # the stream
    messages: int = 0
    """messages put in the outbox"""
    acks: int = 0
    """messages released because the stream has stored them"""
    sends: int = 0
    sent_bytes: int = 0
    resends: int = 0
    """messages sent again because they were refused, their acknowledgement was overdue, or the connection was lost"""
    ack_timeouts: int = 0
    disconnects: int = 0
    refused_no_stream: int = 0
    refused_no_space: int = 0
    refused_too_large: int = 0
    refused_busy: int = 0
    refused_other: int = 0
    # requests and answers
    grants_asked: int = 0
    grants_denied: int = 0
    grants_unanswered: int = 0
    control_bad: int = 0
    snapshot_requests: int = 0
    snapshot_requests_ignored: int = 0
    heartbeats_bad: int = 0
    """messages on this worker's heartbeat subject that are not valid heartbeats"""
    yields: int = 0
    """how often this publisher yielded to a newer one of the same worker"""
    load_samples: int = 0
    load_failures: int = 0
    store_notices: int = 0
    """notices sent to the publisher of the engine's shared store; for a store's publisher: notices received"""
    store_notices_lost: int = 0
    """notices that were not sent because NATS was down or refused them"""
    store_notices_refused: int = 0
    """notices that a store's publisher could not use: damaged, or for another model, tenant or block size"""
    saves: int = 0
    saves_failed: int = 0

    @property
    def refused(self) -> int:
        """Number of negative acknowledgements, for any reason."""
        return (
            self.refused_no_stream
            + self.refused_no_space
            + self.refused_too_large
            + self.refused_busy
            + self.refused_other
        )

    def to_jsonable(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PublisherGauges:
    """The current state of one worker's publisher. `silence_s=None`: there has been no batch yet; `left_out`:
    `Verdict.share` of `kvatlas_publishers.intake.feed_coverage`; `feed_connected=None`: there is no event socket."""

    feed_connected: int | None
    silence_s: float | None
    left_out: float
    state: EngineState
    unsent: int
    unacked: int
    tiers: TierBlocks
    orphans: int
    awaiting_events: int

    @property
    def up(self) -> int:
        return self.state is EngineState.UP

    @property
    def down(self) -> int:
        return self.state is EngineState.DOWN

    @property
    def asleep(self) -> int:
        return self.state is EngineState.ASLEEP

    @property
    def draining(self) -> int:
        return self.state is EngineState.DRAINING
