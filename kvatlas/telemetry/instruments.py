"""The metrics of kvatlas: name, unit, description, and the plain integers behind them. Metric names that dashboards of
endpoint pickers expect are in `router/gateway/field_metrics.py`.

Adding to a counter with attributes costs 5 us, adding to a plain integer 0.03 us. So hot paths count in dataclasses of
integers and register them once (`kvatlas.telemetry.export_metrics`); observable instruments read them when an exporter
asks. Each group has one table for its dataclass: field -> series, that is an instrument plus the attributes that
distinguish the field from the instrument's other fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `unit` in UCUM, as OpenTelemetry has it: `{block}`, `By`, `s`."""

    name: str
    unit: str
    description: str
    kind: Kind = Kind.COUNTER


@dataclass(frozen=True, slots=True)
class Series:
    """The exported series of one field: an instrument with its own attributes. `factor` converts the field's unit to the
    instrument's."""

    instrument: Instrument
    attributes: Mapping[str, str] = field(default_factory=dict)
    factor: float = 1


def _counter(name: str, unit: str, description: str) -> Instrument:
    return Instrument(f"kvatlas.{name}", unit, description)


def _gauge(name: str, unit: str, description: str) -> Instrument:
    return Instrument(f"kvatlas.{name}", unit, description, Kind.GAUGE)


def _histogram(name: str, unit: str, description: str) -> Instrument:
    """For a field that is a `Distribution`."""
    return Instrument(f"kvatlas.{name}", unit, description, Kind.HISTOGRAM)


def _by(instrument: Instrument, attribute: str, **fields: str) -> dict[str, Series]:
    """Several fields of one instrument, distinguished by the value of one attribute."""
    return {name: Series(instrument, {attribute: value}) for name, value in fields.items()}


def _single(instrument: Instrument, name: str, factor: float = 1) -> dict[str, Series]:
    """The only field of an instrument."""
    return {name: Series(instrument, factor=factor)}


_TIERS = ("hbm", "remote_hbm", "cpu_dram", "local_ssd", "object_store")


# ---------------------------------------------------------------- publisher: kvatlas_publishers.counters.PublisherCounters

ENGINE_EVENTS = _counter("publisher.engine.events", "{event}", "Events received from the engine")
ENGINE_POISON = _counter("publisher.engine.poison", "{payload}", "Payloads that could not be decoded, by reason")
FEED = _counter("publisher.feed", "{incident}", "Incidents of the engine's event feed, by kind")
PUBLISHED_BLOCKS = _counter("publisher.blocks", "{block}", "Blocks published, by change")
PUBLISHED_MARKS = _counter("publisher.marks", "{event}", "Clears, checkpoints and snapshots published, by kind")
OVERFLOWS = _counter("publisher.outbox.overflows", "{overflow}", "Outbox overflows; each starts a new incarnation")
OUTBOX_MESSAGES = _counter("publisher.messages", "{message}", "Messages, by step")
SENT_BYTES = _counter("publisher.sent.bytes", "By", "Bytes of messages sent to the stream, resends included")
SEND_FAILURES = _counter(
    "publisher.send.failures", "{failure}", "Failed sends, by reason; the messages wait or are sent again"
)
PUBLISHER_GRANTS = _counter("publisher.grants", "{request}", "Requests for a grant to send a large snapshot, by answer")
CONTROL_REQUESTS = _counter(
    "publisher.control",
    "{request}",
    "Requests received on the control subject, and invalid heartbeats under this worker's name, by kind",
)
YIELDS = _counter("publisher.yields", "{yield}", "Times this publisher yielded to a newer publisher of the same worker")
LOAD_SAMPLES = _counter("publisher.load.samples", "{sample}", "Samples of the engine's health and metrics, by outcome")
STORE_NOTICES = _counter("publisher.store.notices", "{notice}", "Notices of a shared store's blocks, by outcome")
SAVES = _counter("publisher.saves", "{save}", "Saves of the ledger, by outcome")

PUBLISHER = {
    **_single(ENGINE_EVENTS, "engine_events"),
    **_by(
        ENGINE_POISON,
        "reason",
        poison_malformed="malformed",
        poison_oversized="oversized",
        poison_frames="frames",
    ),
    **_by(
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
    **_by(PUBLISHED_BLOCKS, "change", blocks_stored="stored", blocks_removed="removed", snapshot_blocks="in_snapshot"),
    **_by(PUBLISHED_MARKS, "kind", clears="cleared", checkpoints="checkpoint", snapshots="snapshot"),
    **_single(OVERFLOWS, "overflows"),
    **_by(OUTBOX_MESSAGES, "step", messages="queued", sends="sent", resends="sent_again", acks="acknowledged"),
    **_single(SENT_BYTES, "sent_bytes"),
    **_by(
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
    **_by(
        STORE_NOTICES,
        "outcome",
        store_notices="passed_on",
        store_notices_lost="lost",
        store_notices_refused="refused",
    ),
    **_by(PUBLISHER_GRANTS, "answer", grants_asked="asked", grants_denied="denied", grants_unanswered="unanswered"),
    **_by(
        CONTROL_REQUESTS,
        "kind",
        control_bad="bad",
        snapshot_requests="snapshot",
        snapshot_requests_ignored="snapshot_ignored",
        heartbeats_bad="heartbeat_bad",
    ),
    **_single(YIELDS, "yields"),
    **_by(LOAD_SAMPLES, "outcome", load_samples="read", load_failures="failed"),
    **_by(SAVES, "outcome", saves="saved", saves_failed="failed"),
}

# ---------------------------------------------------------------- engine: kvatlas_publishers.counters.PublisherGauges

FEED_CONNECTED = _gauge("publisher.feed.connected", "{feed}", "1 while the engine's event socket is connected")
FEED_SILENCE = _gauge("publisher.feed.silence", "s", "Time since the engine's last batch of events")
ENGINE_STATE = _gauge("publisher.engine.state", "{engine}", "1 for the state that the engine is in")
INTAKE_LEFT_OUT = _gauge(
    "publisher.left_out",
    "{share}",
    "Share of the reported blocks that could not be published; also 1 if the engine serves requests and sends no events",
)
OUTBOX_DEPTH = _gauge(
    "publisher.outbox.messages", "{message}", "Messages in the outbox: waiting, or sent and not acknowledged"
)
LEDGER_TIERS = _gauge("ledger.held", "{block}", "Blocks that the worker is published to hold, by tier")
LEDGER_ORPHANS = _gauge("ledger.orphans", "{block}", "Blocks that the engine holds behind a hole: not published")
LEDGER_AWAITING = _gauge("ledger.awaiting", "{event}", "Stored events that wait for their parent")

ENGINE = {
    **_single(FEED_CONNECTED, "feed_connected"),
    **_single(FEED_SILENCE, "silence_s"),
    **_single(INTAKE_LEFT_OUT, "left_out"),
    **_by(ENGINE_STATE, "state", up="up", down="down", asleep="asleep", draining="draining"),
    **_by(OUTBOX_DEPTH, "state", unsent="waiting", unacked="sent"),
    **_by(
        LEDGER_TIERS,
        "tier",
        **{f"tiers.{tier}": tier for tier in _TIERS},
    ),
    **_single(LEDGER_ORPHANS, "orphans"),
    **_single(LEDGER_AWAITING, "awaiting_events"),
}

# ---------------------------------------------------------------- ledger: kvatlas_publishers.ledger.counters.LedgerCounters

LEDGER_BLOCKS = _counter("ledger.blocks", "{block}", "Blocks that the engine stored and removed, by change")
LEDGER_SKIPPED = _counter("ledger.skipped", "{block}", "Blocks that can't be published, by reason")
LEDGER_HOLES = _counter(
    "ledger.holes",
    "{block}",
    "Blocks withdrawn because an ancestor is missing, restored, and removed because a removed hash may stand for them",
)

LEDGER = {
    **_by(
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
    **_by(
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
    **_by(LEDGER_HOLES, "change", withdrawn="withdrawn", restored="restored", judged_removals="removed_by_shared_hash"),
}

# ---------------------------------------------------------------- indexer: kvatlas_indexer.counters.IndexerCounters

PARTITION_READS = _counter(
    "indexer.readings", "{reading}", "Reads of a partition started, broken off, and restarted on a new stream"
)
INDEXER_POISON = _counter("indexer.poison", "{message}", "Messages refused before they reached the index, by reason")
DEAD_LETTERS_DROPPED = _counter(
    "indexer.dead_letters.dropped", "{message}", "Refused messages that could not be kept as dead letters"
)
STORE_ERRORS = _counter("indexer.store.errors", "{call}", "Apply calls that the store did not answer; they are retried")
STORE_FULL = _counter(
    "indexer.store.full", "{call}", "Apply calls refused because the store is out of memory: an alarm"
)
INDEXED_MESSAGES = _counter("indexer.messages", "{message}", "Messages handed to the index, by outcome")
LAG = _histogram("indexer.lag", "s", "Age of the oldest message of a batch when it is applied, once for each message")
APPLY_TIME = _histogram("indexer.apply.duration", "s", "Calls to the store that apply messages, retries included")
SNAPSHOT_REQUESTS = _counter(
    "indexer.snapshot.requests", "{request}", "Snapshots requested from publishers, by outcome"
)
GRANTS = _counter("indexer.grants", "{request}", "Publishers' requests to send a large snapshot, by answer")
HEARTBEATS = _counter("indexer.heartbeats", "{heartbeat}", "Heartbeats received, by validity")
RECORDS = _counter("indexer.records", "{record}", "Fleet records written, and those that could not be, by outcome")
POOLS_REPAIRED = _counter(
    "indexer.pools.repaired",
    "{repair}",
    "Times that a pool's bookings and loads were dropped because a record was damaged",
)
LIVENESS = _counter("indexer.liveness", "{worker}", "Workers whose liveness changed, by change")
PARTITION_MOVES = _counter("indexer.partitions", "{partition}", "Partitions taken, given up and lost")
CLEANUPS = _counter(
    "indexer.cleanups",
    "{cleanup}",
    "Sweeps of retired holders, scrubs of a shard, scopes forgotten because they are unused, and entries without a holder "
    "removed from blocks, by kind",
)
SCRUBBED = _counter("indexer.scrub.workers", "{worker}", "Workers recounted against their digest, by finding")

INDEXER = {
    **_by(PARTITION_READS, "change", readings_started="started", readings_broken="broken", new_streams="new_stream"),
    **_by(
        INDEXER_POISON,
        "reason",
        poison_malformed="malformed",
        poison_version="version",
        poison_oversized="oversized",
        poison_scope="scope",
        poison_incarnation="incarnation",
        poison_refused="refused",
        poison_wrong_subject="wrong_subject",
        poison_wrong_partition="wrong_partition",
        poison_identity="identity",
    ),
    **_single(DEAD_LETTERS_DROPPED, "dead_letters_dropped"),
    **_single(STORE_ERRORS, "store_errors"),
    **_single(STORE_FULL, "store_full"),
    **_by(
        INDEXED_MESSAGES,
        "outcome",
        applied="applied",
        duplicates="duplicate",
        stale="stale",
        gaps="gap",
        refused="refused",
        failed_checks="failed_check",
        moved="moved",
    ),
    **_single(LAG, "event_lag"),
    **_single(APPLY_TIME, "apply_time"),
    **_by(
        SNAPSHOT_REQUESTS,
        "outcome",
        snapshots_asked="asked",
        snapshots_unanswered="unanswered",
        snapshots_refused="refused",
    ),
    **_by(GRANTS, "answer", grants_given="given", grants_refused="refused", grants_bad="bad", grants_excess="excess"),
    **_by(
        HEARTBEATS,
        "validity",
        heartbeats="good",
        heartbeats_bad="bad",
        heartbeats_refused="refused",
        heartbeats_excess="excess",
    ),
    **_by(RECORDS, "outcome", fleet_writes="written", records_bad="refused"),
    **_single(POOLS_REPAIRED, "pools_repaired"),
    **_by(LIVENESS, "change", workers_lost="lost", workers_retired="retired", retirements_held="retirement_held"),
    **_by(PARTITION_MOVES, "change", partitions_taken="taken", partitions_given="given", leases_lost="lost"),
    **_by(
        CLEANUPS,
        "kind",
        sweeps="sweep",
        scrubs="scrub",
        scopes_forgotten="scope_forgotten",
        scrub_strays="stray_removed",
    ),
    **_by(SCRUBBED, "found", scrub_damaged="damage", scrub_given_up="no_rest"),
}

# ---------------------------------------------------------------- replica: kvatlas_indexer.gauges.ReplicaGauges

PARTITIONS = _gauge("indexer.partitions.configured", "{partition}", "Partitions of the stream")
PARTITIONS_OWNED = _gauge("indexer.partitions.owned", "{partition}", "Partitions owned by this replica")
MESSAGES_PENDING = _gauge("indexer.pending", "{message}", "Messages of owned partitions that are not applied yet")
WORKERS = _gauge("indexer.workers", "{worker}", "Workers of owned partitions, by liveness")
IN_DOUBT = _gauge("indexer.workers.in_doubt", "{worker}", "Workers of owned partitions whose residency is in doubt")
WITHOUT_ROOM = _gauge(
    "indexer.workers.without_room", "{worker}", "Workers left out of the index because the store is out of memory"
)
OUT_OF_MEMORY = _gauge("indexer.store.out_of_memory", "{shard}", "Owned shards whose store is out of memory: an alarm")
EVICTING = _gauge("indexer.store.evicting", "{shard}", "Owned shards whose store evicts keys: an alarm")
RETIRED_HOLDERS = _gauge("indexer.holders.retired", "{holder}", "Retired holders that are not swept yet")

REPLICA = {
    **_single(PARTITIONS, "partitions"),
    **_single(PARTITIONS_OWNED, "partitions_owned"),
    **_single(MESSAGES_PENDING, "messages_pending"),
    **_by(WORKERS, "liveness", workers_alive="alive", workers_lost="lost"),
    **_single(IN_DOUBT, "workers_in_doubt"),
    **_single(WITHOUT_ROOM, "workers_without_room"),
    **_single(OUT_OF_MEMORY, "shards_out_of_memory"),
    **_single(EVICTING, "shards_evicting"),
    **_single(RETIRED_HOLDERS, "retired_holders"),
}

# ---------------------------------------------------------------- partition: kvatlas_indexer.partition.reader.PartitionStatus

PARTITION_PENDING = _gauge("indexer.partition.pending", "{message}", "Messages that are not applied yet, by partition")

PARTITION = _single(PARTITION_PENDING, "pending")

# ---------------------------------------------------------------- index: kvatlas.blocks.residency.ModelBlocks

INDEX_BLOCKS = _gauge(
    "index.size",
    "{residency}",
    "Residencies in the index, one for each block, worker and tier, by tier and model; from one replica only",
)
INDEX_BYTES = _gauge(
    "index.bytes", "By", "Bytes of KV cache that the index describes, by tier and model; from one replica only"
)
STORE_MEMORY = _gauge(
    "store.memory", "By", "Memory of all primaries of the store, used and allowed; from one replica only"
)
INDEX_CHANGES = _counter("index.changes", "{residency}", "Residencies added to and removed from the index, by change")
INDEX_WRITTEN = _counter("index.written", "By", "Key and value bytes of block entries sent to the store")

INDEX = {
    **_by(INDEX_BLOCKS, "tier", **{f"blocks.{tier}": tier for tier in _TIERS}),
    **_by(INDEX_BYTES, "tier", **{f"bytes.{tier}": tier for tier in _TIERS}),
}

# ---------------------------------------------------------------- store: kvatlas_indexer.gauges.StoreGauges

WORKERS_MISSING = _gauge(
    "indexer.workers.missing",
    "{worker}",
    "Workers that fell silent within the last hour and are not back; from one replica",
)

STORE = {
    **_by(STORE_MEMORY, "what", used_bytes="used", limit_bytes="limit"),
    **_single(WORKERS_MISSING, "workers_missing"),
}

# ---------------------------------------------------------------- index of one replica: kvatlas.blocks.residency.IndexWork

INDEX_WORK = {
    **_by(INDEX_CHANGES, "change", puts="put", removes="remove"),
    **_single(INDEX_WRITTEN, "bytes_written"),
}

# ---------------------------------------------------------------- router: router_client.counters.RouterCounters

DECISIONS = _counter("router.decisions", "{decision}", "Routing decisions, by outcome")
DECISION_TIME = _histogram("router.decision.duration", "s", "Decisions, with all that they wait for")
STEP_TIME = _histogram("router.decision.step.duration", "s", "Calls to the store that a decision waits for, by step")
PREDICTION_ERROR = _histogram(
    "router.prediction.error",
    "{token}",
    "By how many tokens an engine's cached prompt tokens differ from the prediction, by direction; equal ones are not in it",
)
ANSWERED_TOKENS = _counter(
    "router.prompt.tokens", "{token}", "Prompt tokens of answers whose engines report how many of them were cached"
)
SAVED_TOKENS = _counter("router.saved.tokens", "{token}", "Prompt tokens that engines did not compute, as they report")
SAVED_TIME = _counter("router.saved.time", "s", "Engine time that computing these tokens would have taken")
PROMPT_BLOCKS = _counter(
    "router.blocks", "{block}", "Blocks of the routed prompts, and those that the chosen worker held"
)
HELD_TOKENS = _counter(
    "router.held.tokens",
    "{token}",
    "Tokens of routed prompts that the chosen worker held, those its engine would reuse, and those that it was computing",
)
WITHOUT_INDEX = _counter(
    "router.decisions.without_index", "{decision}", "Decisions made without the index, by what replaced it"
)
FELL_OPEN = _counter("router.decisions.open", "{decision}", "Decisions that fell open, by what did not answer in time")
SHADOWED = _counter(
    "router.decisions.shadow", "{decision}", "Decisions that followed another policy, and how many of them agreed"
)
ROUTER_FAILURES = _counter("router.store.failures", "{call}", "Calls that the store did not answer in time, by part")
RESERVATIONS = _counter(
    "router.reservations",
    "{reservation}",
    "Reservations booked and released, and router leases that lapsed with all their reservations",
)
PAIRS = _counter("router.decisions.pairs", "{decision}", "Decisions with a separate prefill worker")
OVER_LIMITS = _counter(
    "router.decisions.over_limits",
    "{decision}",
    "Decisions for a worker that has no room or would miss the SLO, by limit",
)
LEARNED = _counter(
    "router.learned", "{request}", "Finished requests, by whether their worker's rates were learned from them"
)

ROUTER = {
    **_by(DECISIONS, "outcome", routed="routed", no_workers="no_workers"),
    **_by(WITHOUT_INDEX, "instead", by_load="load", by_prefix_hash="prefix_hash"),
    **_by(SHADOWED, "outcome", followed="followed", agreed="agreed"),
    **_by(ROUTER_FAILURES, "part", index_failures="index", booking_failures="reservations", fleet_failures="fleet"),
    **_by(
        FELL_OPEN,
        "cause",
        open_index="index",
        open_fleet="fleet",
        open_booking="booking",
        open_connections="connections",
    ),
    **_by(RESERVATIONS, "change", booked="booked", released="released", lapsed="lease_lapsed"),
    **_single(PAIRS, "pairs"),
    **_by(OVER_LIMITS, "limit", no_room="room", over_slo="slo"),
    **_by(LEARNED, "outcome", learned="learned", said_nothing="nothing"),
    **_single(DECISION_TIME, "decision_time"),
    **_by(STEP_TIME, "step", lookup_time="lookup", booking_time="booking"),
    **_by(PREDICTION_ERROR, "direction", found_more="more", found_fewer="fewer"),
    **_single(ANSWERED_TOKENS, "prompt_tokens"),
    **_single(SAVED_TOKENS, "saved_tokens"),
    **_single(SAVED_TIME, "saved_s"),
    **_by(PROMPT_BLOCKS, "what", required_blocks="required", overlap_blocks="held"),
    **_by(HELD_TOKENS, "what", resident_tokens="resident", usable_tokens="usable", predicted_tokens="predicted"),
}

# ---------------------------------------------------------------- rates: kvatlas.cost.learned_rates.LearnedRates

PREFILL_RATE = _gauge("router.rates.prefill", "s", "Learned time to compute one prompt token")
STEP_RATE = _gauge(
    "router.rates.step", "s", "Learned base time of a decode step, without the share of each running request"
)
RATE_ERROR = _gauge("router.rates.error", "1", "Recent relative error of the expected times")

RATES = {
    **_single(PREFILL_RATE, "rates.prefill_us_per_token", 1e-6),
    **_single(STEP_RATE, "rates.tpot_base_us", 1e-6),
    **_by(RATE_ERROR, "of", first_error="first token", next_error="next token"),
}

# ---------------------------------------------------------------- proxy: kvatlas_router.proxy.counters.ProxyCounters

PROXY_ENDS = _counter("proxy.ends", "{request}", "Requests ended, by how")
PROXY_RETRIES = _counter("proxy.retries", "{try}", "Attempts moved to another worker, by reason")
PROXY_WAIT = _histogram("proxy.overhead", "s", "From a request's arrival until it is sent to an engine, by attempt")
GENAI_TTFT = Instrument(
    "gen_ai.server.time_to_first_token",
    "s",
    "From a request's arrival to the first token of its streamed answer",
    Kind.HISTOGRAM,
)
GENAI_TIME = Instrument(
    "gen_ai.server.request.duration", "s", "From a request's arrival to the end of its complete answer", Kind.HISTOGRAM
)
PROXY_HELD = _counter("proxy.held", "{booking}", "Bookings made over HTTP, by change")

PROXY_APART = _counter(
    "proxy.apart", "{try}", "Tries with a prefill worker of their own: sent, and failed by that worker"
)
PROXY_FETCHING = _counter("proxy.fetching", "{try}", "Tries whose engine was sent to fetch KV from another one")
PROXY_BUDGET = _counter("proxy.retries.budget", "{try}", "Further tries, by whether the retry budget allowed them")
PROXY_QUEUED = _counter("proxy.queued", "{request}", "Requests for which every engine was full, by outcome")

PROXY = {
    **_by(
        PROXY_ENDS,
        "end",
        answered="answered",
        refused_by_engine="refused",
        gave_up="gave_up",
        gone="client_gone",
        broken="engine_gone",
        cut="stopped",
        shed="shed",
    ),
    **_by(PROXY_RETRIES, "reason", refused="refused", unreachable="unreachable"),
    **_by(PROXY_APART, "event", apart="sent", apart_failed="failed"),
    **_single(PROXY_FETCHING, "fetching"),
    **_by(PROXY_BUDGET, "outcome", retried="allowed", retries_denied="denied"),
    **_single(PROXY_WAIT, "overhead"),
    **_single(GENAI_TTFT, "ttft"),
    **_single(GENAI_TIME, "request_time"),
    **_by(PROXY_QUEUED, "outcome", queued="served", queue_full="refused"),
    **_by(
        PROXY_HELD, "change", held="booked", held_done="done", held_expired="expired", done_elsewhere="done_elsewhere"
    ),
}

# ---------------------------------------------------------------- proxy_load: kvatlas_router.proxy.exchange.Exchange

PROXY_IN_FLIGHT = _gauge("proxy.in_flight", "{request}", "Requests that run in this router")
PROXY_IN_FLIGHT_TOKENS = _gauge(
    "proxy.in_flight.tokens", "{token}", "Prompt tokens of the requests that run in this router"
)
PROXY_WAITING = _gauge("proxy.waiting", "{request}", "Requests that wait in this router for an engine with room")

PROXY_LOAD = {
    **_single(PROXY_IN_FLIGHT, "in_flight"),
    **_single(PROXY_IN_FLIGHT_TOKENS, "in_flight_tokens"),
    **_single(PROXY_WAITING, "waiting"),
}

# ---------------------------------------------------------------- gateway: kvatlas_router.gateway.counters.GatewayCounters

GATEWAY_PICKS = _counter("gateway.picks", "{request}", "Requests by what their endpoint was picked by, or why none was")
GATEWAY_QUEUED = _counter("gateway.queued", "{request}", "Requests that waited for an engine with room")
GATEWAY_ENDS = _counter("gateway.ends", "{request}", "How requests with an endpoint ended")
GATEWAY_SERVED_ELSEWHERE = _counter("gateway.served_elsewhere", "{request}", "Requests answered by a fallback")
GATEWAY_STREAM_ERRORS = _counter(
    "gateway.streams.unusable", "{stream}", "Streams that could not be processed, by reason"
)
GATEWAY_NO_ADDRESS = _counter(
    "gateway.workers.no_address", "{worker}", "Times that a worker was read whose address no gateway can use"
)
GATEWAY_PICK_TIME = _histogram("gateway.pick.duration", "s", "From a request's reading to its decision")

GATEWAY = {
    **_by(
        GATEWAY_PICKS,
        "by",
        by_prompt="prompt",
        by_load="load",
        unpublished="unpublished",
        refused="refused",
        shed="shed",
        queue_full="queue_full",
        late="late",
        undecided="undecided",
    ),
    **_single(GATEWAY_QUEUED, "queued"),
    **_by(GATEWAY_ENDS, "end", answered="answered", failed="failed", left="left", gone="gone"),
    **_single(GATEWAY_SERVED_ELSEWHERE, "served_elsewhere"),
    **_by(GATEWAY_STREAM_ERRORS, "reason", out_of_order="out_of_order", observed="observed"),
    **_single(GATEWAY_NO_ADDRESS, "no_address"),
    **_single(GATEWAY_PICK_TIME, "pick_time"),
}

# ---------------------------------------------------------------- gateway_load: kvatlas_router.gateway.counters.GatewayGauges

GATEWAY_IN_FLIGHT = _gauge("gateway.in_flight", "{request}", "Requests with an endpoint whose end is not known yet")
GATEWAY_WAITING = _gauge("gateway.waiting", "{request}", "Requests that wait in this picker for an engine with room")

GATEWAY_LOAD = {**_single(GATEWAY_IN_FLIGHT, "in_flight"), **_single(GATEWAY_WAITING, "waiting")}

# ------------------------------------------------ index_replica: kvatlas.index.local_copy.counters.ReplicaCounters

COPY_ANSWERS = _counter(
    "index_replica.answers", "{lookup}", "Lookups of a router with a replica of the index, by who answered and why"
)
COPIES = _counter("index_replica.copies", "{copy}", "Copies of the index made, resumed from the file, and given up")
COPY_SAVES = _counter("index_replica.saves", "{save}", "Times the copy was written to its file, by outcome")
COPY_CHECKS = _counter("index_replica.checks", "{worker}", "Workers whose digests were compared with the store's")
COPY_MESSAGES = _counter(
    "index_replica.messages", "{message}", "Messages read from the stream, those refused among them"
)

COPY_CURRENT = _gauge(
    "index_replica.current", "{copy}", "1 while the replica of the index answers, 0 while the store does"
)
COPY_STALENESS = _gauge("index_replica.staleness", "s", "The most that the replica may be behind the stream")
COPY_MEMORY = _gauge("index_replica.memory", "By", "Memory of the replica, as estimated")

INDEX_REPLICA = {
    **_by(
        COPY_ANSWERS,
        "by",
        answered="replica",
        while_loading="store_while_loading",
        while_stale="store_while_stale",
        while_large="store_while_too_large",
    ),
    **_by(COPIES, "change", loads="made", resumed="resumed", losses="given_up"),
    **_by(COPY_SAVES, "outcome", saves="written", save_failures="failed"),
    **_by(COPY_CHECKS, "outcome", verified="compared", mismatches="different"),
    **_by(COPY_MESSAGES, "kind", messages_read="read", refused="refused"),
}
INDEX_REPLICA_NOW = {
    **_single(COPY_CURRENT, "current"),
    **_single(COPY_STALENESS, "staleness_s"),
    **_single(COPY_MEMORY, "memory_bytes"),
}
"""Fields of kvatlas.index.local_copy.local_copy.IndexReplica."""

# ---------------------------------------------------------------- outliers: kvatlas_router.outliers.monitor.OutlierCounters

ENGINE_ANSWERS = _counter("outliers.answers", "{answer}", "Engines' answers, by what they say about their worker")
EJECTIONS = _counter("outliers.changes", "{worker}", "Workers ejected because they fail, and readmitted")

EJECTED_NOW = _gauge("outliers.ejected", "{worker}", "Workers left alone because they fail")

EJECTED = _single(EJECTED_NOW, "ejected_workers")
"""Fields of kvatlas_router.outliers.monitor.OutlierMonitor."""
OUTLIERS = {
    **_by(ENGINE_ANSWERS, "verdict", good="good", bad="bad"),
    **_by(EJECTIONS, "change", ejections="ejected", readmissions="readmitted"),
}

# ---------------------------------------------------------------- progress: kvatlas_router.progress.monitor.ProgressCounters

STALLS = _counter(
    "progress.changes", "{worker}", "Engines found to make no progress with work, and to make progress again"
)
PROGRESS_PROBES = _counter("progress.probes", "{request}", "Small requests sent to engines that may be stalled")
MOVED = _counter("progress.moved", "{request}", "Requests without a byte that left a stalled engine for another")
STALLED_NOW = _gauge("progress.stalled", "{worker}", "1 for a worker whose engine makes no progress though it has work")

STALLED = _single(STALLED_NOW, "stalled")
"""An engine of kvatlas_router.progress.monitor, with its worker's name."""
PROGRESS = {
    **_by(STALLS, "change", stalls="stalled", returns="returned"),
    **_single(PROGRESS_PROBES, "probes"),
    **_single(MOVED, "moved"),
}

# ---------------------------------------------------------------- tokens: kvatlas_router.tokens.counters.TokenCounters

TOKENIZED = _counter("tokens.requests", "{request}", "Requests, by how their token ids were found or why not")
TOKENIZE_TIME = _histogram("tokens.duration", "s", "Waiting for a prompt's token ids")

TOKENS = {
    **_by(
        TOKENIZED,
        "outcome",
        tokenized="tokenized",
        given="given",
        late="late",
        busy="busy",
        unsupported="unsupported",
        failed="failed",
    ),
    **_single(TOKENIZE_TIME, "reading_time"),
}

# ---------------------------------------------------------------- index server: kvatlas_router.queries.counters.QueryCounters

QUESTIONS = _counter("index_server.questions", "{question}", "Questions to the index server, by outcome")
QUESTION_TIME = _histogram("index_server.duration", "s", "Answering a question to the index server")
CHANGES_SENT = _counter("index_server.changes", "{change}", "Changes sent to those who keep a copy of the index")
FOLLOWERS = _gauge("index_server.followers", "{follower}", "Those who keep a copy of the index and are connected now")

QUERIES = {
    **_by(QUESTIONS, "outcome", answered="answered", refused="refused", failed="failed"),
    **_single(QUESTION_TIME, "answer_time"),
    **_single(CHANGES_SENT, "changes"),
}
FOLLOWING = _single(FOLLOWERS, "followers")

# ---------------------------------------------------------------- answers: kvatlas.predictions.accuracy.AnswerCounts

PROMPTS_COMPARED = _counter("tokens.prompts", "{request}", "Prompt lengths that engines report, compared with ours")
CACHED_COMPARED = _counter(
    "tokens.cached", "{request}", "Answers, by how their cached tokens compare with the prediction"
)
PREDICTED_TOKENS = _counter(
    "tokens.predicted", "{token}", "Prompt tokens predicted to be cached, if the engine reports them"
)
CACHED_TOKENS = _counter("tokens.found", "{token}", "Prompt tokens that engines report as cached")

ANSWERS = {
    **_by(PROMPTS_COMPARED, "outcome", prompts_equal="equal", prompts_differ="different"),
    **_by(
        CACHED_COMPARED,
        "outcome",
        cached_equal="equal",
        cached_other_tokens="other_tokens",
        cached_without_index="without_index",
        cached_bounded="bounded",
        cached_newer="newer",
        cached_unconfirmed="unconfirmed",
        cached_evicted="evicted",
        cached_untold="untold",
    ),
    **_single(PREDICTED_TOKENS, "predicted_tokens"),
    **_single(CACHED_TOKENS, "cached_tokens"),
}

# ---------------------------------------------------------------- http: kvatlas.runtime.http_counters.HttpCounters

HTTP_REFUSED = _counter("http.refused", "{request}", "HTTP requests and connections refused at the border, by reason")

HTTP = _by(
    HTTP_REFUSED,
    "reason",
    framing="framing",
    headers="headers",
    too_long="too_long",
    too_late="too_late",
    slow="slow",
    too_many="too_many",
    denied="denied",
    upgrade="upgrade",
)

# ---------------------------------------------------------------- tenancy: kvatlas_router.tenancy.counters.TenancyCounters

TENANCY_REQUESTS = _counter(
    "tenancy.requests", "{request}", "Requests to a router with a file of clients, by what they prove and their limits"
)

TENANCY = _by(
    TENANCY_REQUESTS,
    "outcome",
    proven="proven",
    unproven="unproven",
    foreign="foreign_tenant",
    over_requests="over_requests",
    over_tokens="over_tokens",
    too_long="too_long",
)
# ---------------------------------------------------------------- process: kvatlas.runtime.process_gauges.ProcessGauges

DESCRIPTORS = _gauge("process.descriptors", "{descriptor}", "File descriptors that are open, and the most that may be")
CERTIFICATE = _gauge("process.certificate", "s", "Until the first of this process' certificates ends")

PROCESS = {
    **_by(DESCRIPTORS, "what", descriptors_open="open", descriptors_most="most"),
    **_single(CERTIFICATE, "certificate_s"),
}

# ---------------------------------------------------------------- by OpenTelemetry's conventions for all kinds of systems

DB_TIME = Instrument(
    "db.client.operation.duration", "s", "Calls to functions of the store, by function", Kind.HISTOGRAM
)
HTTP_TIME = Instrument(
    "http.server.request.duration",
    "s",
    "Requests to engines through this router, to the end of the answer",
    Kind.HISTOGRAM,
)
MESSAGES_SENT = Instrument(
    "messaging.client.sent.messages", "{message}", "Messages sent to the stream, each try counted"
)
MESSAGES_CONSUMED = Instrument("messaging.client.consumed.messages", "{message}", "Messages read from the stream")
MESSAGES_TIME = Instrument(
    "messaging.process.duration", "s", "Applying batches of messages to the index", Kind.HISTOGRAM
)
MESSAGING: Mapping[str, str] = {
    "messaging.system": "nats",
    "messaging.destination.template": "kvatlas.events.{partition}.{worker}",
}


def _messaging(operation: str) -> Mapping[str, str]:
    return {**MESSAGING, "messaging.operation.name": operation}


STORE_CALL = _single(DB_TIME, "duration")
"""Fields of kvatlas.telemetry.duration_series.Duration, here and in the next table."""
HTTP_REQUEST = _single(HTTP_TIME, "duration")
MESSAGES_OUT = {"sends": Series(MESSAGES_SENT, _messaging("send"))}
"""The publisher's counters under standard names; in the next table, the indexer's."""
MESSAGES_IN = {
    "messages_read": Series(MESSAGES_CONSUMED, _messaging("receive")),
    "apply_time": Series(MESSAGES_TIME, _messaging("process")),
}

INSTRUMENTS: dict[str, dict[str, Series]] = {
    "publisher": PUBLISHER,
    "engine": ENGINE,
    "ledger": LEDGER,
    "indexer": INDEXER,
    "replica": REPLICA,
    "partition": PARTITION,
    "index": INDEX,
    "store": STORE,
    "index_work": INDEX_WORK,
    "router": ROUTER,
    "rates": RATES,
    "proxy": PROXY,
    "proxy_load": PROXY_LOAD,
    "gateway": GATEWAY,
    "gateway_load": GATEWAY_LOAD,
    "index_replica": INDEX_REPLICA,
    "index_replica_now": INDEX_REPLICA_NOW,
    "outliers": OUTLIERS,
    "ejected": EJECTED,
    "progress": PROGRESS,
    "stalled": STALLED,
    "tokens": TOKENS,
    "queries": QUERIES,
    "following": FOLLOWING,
    "answers": ANSWERS,
    "tenancy": TENANCY,
    "http": HTTP,
    "process": PROCESS,
    "http_request": HTTP_REQUEST,
    "store_call": STORE_CALL,
    "messages_out": MESSAGES_OUT,
    "messages_in": MESSAGES_IN,
}
"""Group -> field of the group's counters (a dot leads into a field) -> its series."""

TOTALS: dict[str, set[str]] = {
    "publisher": {"engine_batches", "poison"},
    "engine": {"state"},
    "ledger": {"cleared_events"},
    "indexer": {"messages_read"},
    "index_work": {"prefix_scans"},
    "rates": {"overhead_us", "requests"},
    "proxy": {"requests", "sent", "untokenized"},
}
"""Fields that are not exported: other fields or another group have the same data, or only kvatlas itself reads them."""
