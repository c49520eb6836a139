"""Instruments for an engine's sidecar: the feed, the publisher, and its ledger."""

from kvatlas.telemetry.instruments.instrument import TIERS, by, counter, gauge, single

# ---------------------------------------------------------------- publisher: kvatlas_publishers.counters.PublisherCounters

ENGINE_EVENTS = counter("publisher.engine.events", "{event}", "Events received from the engine")
ENGINE_POISON = counter("publisher.engine.poison", "{payload}", "Payloads that could not be decoded, by reason")
FEED = counter("publisher.feed", "{incident}", "Incidents of the engine's event feed, by kind")
PUBLISHED_BLOCKS = counter("publisher.blocks", "{block}", "Blocks published, by change")
OVERFLOWS = counter("publisher.outbox.overflows", "{overflow}", "Outbox overflows; each starts a new incarnation")
OUTBOX_MESSAGES = counter("publisher.messages", "{message}", "Messages, by step")
SEND_FAILURES = counter(
    "publisher.send.failures", "{failure}", "Failed sends, by reason; the messages wait or are sent again"
)
YIELDS = counter("publisher.yields", "{yield}", "Times this publisher yielded to a newer publisher of the same worker")
REFUSED = counter(
    "publisher.refused", "{message}", "Messages of other processes that a publisher could not use, by what they are"
)
SAVES_FAILED = counter("publisher.saves.failed", "{save}", "Times that the state could not be saved")
LOAD_SAMPLES = counter("publisher.load.samples", "{sample}", "Samples of the engine's health and metrics, by outcome")

PUBLISHER = {
    **single(ENGINE_EVENTS, "engine_events"),
    **by(
        ENGINE_POISON,
        "reason",
        poison_malformed="malformed",
        poison_oversized="oversized",
        poison_frames="frames",
    ),
    **by(
        FEED,
        "incident",
        feed_gaps="gap",
        feed_gaps_filled="gap_filled",
        feed_duplicates="duplicate",
        feed_replays="replay",
        feed_replays_failed="replay_failed",
        feed_restarts="restart",
        event_gaps="event_gap",
        event_restarts="event_restart",
        event_duplicates="event_duplicate",
        feed_started_over="started_over",
        feed_lost="lost",
        feed_unheard="unheard",
        folds_failed="not_taken_in",
        skipped_events="event_skipped",
        dead_letters_dropped="dead_letter_dropped",
    ),
    **by(PUBLISHED_BLOCKS, "change", blocks_stored="stored", blocks_removed="removed", snapshot_blocks="in_snapshot"),
    **single(OVERFLOWS, "overflows"),
    **by(OUTBOX_MESSAGES, "step", messages="queued", sends="sent", resends="sent_again", acks="acknowledged"),
    **by(
        SEND_FAILURES,
        "reason",
        ack_timeouts="ack_timeout",
        disconnects="disconnect",
        refused_no_stream="no_stream",
        refused_no_space="no_space",
        refused_too_large="too_large",
        refused_busy="busy",
        refused_other="other",
    ),
    **single(YIELDS, "yields"),
    **by(
        REFUSED,
        "what",
        heartbeats_bad="heartbeat",
        control_bad="control",
        store_notices_refused="store_notice",
    ),
    **single(SAVES_FAILED, "saves_failed"),
    **by(LOAD_SAMPLES, "outcome", load_samples="read", load_failures="failed"),
}

# ---------------------------------------------------------------- engine: kvatlas_publishers.counters.PublisherGauges

FEED_CONNECTED = gauge("publisher.feed.connected", "{feed}", "1 while the engine's event socket is connected")
FEED_SILENCE = gauge("publisher.feed.silence", "s", "Time since the engine's last batch of events")
ENGINE_STATE = gauge("publisher.engine.state", "{engine}", "1 for the state that the engine is in")
INTAKE_LEFT_OUT = gauge(
    "publisher.left_out",
    "{share}",
    "Share of the reported blocks that could not be published; also 1 if the engine serves requests and sends no events",
)
OUTBOX_DEPTH = gauge(
    "publisher.outbox.messages", "{message}", "Messages in the outbox: waiting, or sent and not acknowledged"
)
LEDGERTIERS = gauge("ledger.held", "{block}", "Blocks that the worker is published to hold, by tier")
LEDGER_ORPHANS = gauge("ledger.orphans", "{block}", "Blocks that the engine holds after a hole: not published")
LEDGER_AWAITING = gauge("ledger.awaiting", "{event}", "Stored events that wait for their parent")

ENGINE = {
    **single(FEED_CONNECTED, "feed_connected"),
    **single(FEED_SILENCE, "silence_s"),
    **single(INTAKE_LEFT_OUT, "left_out"),
    **by(ENGINE_STATE, "state", up="up", down="down", asleep="asleep", draining="draining"),
    **by(OUTBOX_DEPTH, "state", unsent="waiting", unacked="sent"),
    **by(
        LEDGERTIERS,
        "tier",
        **{f"tiers.{tier}": tier for tier in TIERS},
    ),
    **single(LEDGER_ORPHANS, "orphans"),
    **single(LEDGER_AWAITING, "awaiting_events"),
}

# ---------------------------------------------------------------- ledger: kvatlas_publishers.ledger.counters.LedgerCounters

LEDGER_BLOCKS = counter("ledger.blocks", "{block}", "Blocks that the engine stored and removed, by change")
LEDGER_SKIPPED = counter("ledger.skipped", "{block}", "Blocks that can't be published, by reason")

LEDGER = {
    **by(
        LEDGER_BLOCKS,
        "change",
        stored="stored",
        removed="removed",
        store_told="told_of_store",
        sparse="stored_in_sparse_group",
        parents_found="parent_found",
        parent_removed="parent_removed",
        zero_parent="parent_named_zero",
    ),
    **by(
        LEDGER_SKIPPED,
        "reason",
        removed_unknown="removed_unknown",
        unknown_parent="unknown_parent",
        unindexable="unindexable",
        other_block_size="other_block_size",
        placeholder_unknown="placeholder_unknown",
        adapter_unnamed="adapter_unnamed",
        engine_too_old="engine_too_old",
        other_chain="other_chain",
        removal_untold="removal_untold",
        store_unknown="store_unknown",
    ),
}
