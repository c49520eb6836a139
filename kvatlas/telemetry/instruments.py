"""Every metric of kvatlas: name, unit, description, and the plain integers it is read from.

A counter add with attributes costs 5 us, a plain integer 0.03 us: so the hot paths count in dataclasses of integers,
register them once (`kvatlas.telemetry.export_metrics`), and an observable instrument reads them when an exporter asks. One
table a group, that is a dataclass: field -> instrument, and the attributes that tell it from others of the instrument.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `unit` in UCUM, as OpenTelemetry has it: `{block}`, `By`, `us`."""

    name: str
    unit: str
    description: str
    kind: Kind = Kind.COUNTER


@dataclass(frozen=True, slots=True)
class Series:
    """How one field is read: into which instrument, with which attributes of its own."""

    instrument: Instrument
    attributes: Mapping[str, str] = field(default_factory=dict)


def _counter(name: str, unit: str, description: str) -> Instrument:
    return Instrument(f"kvatlas.{name}", unit, description)


def _gauge(name: str, unit: str, description: str) -> Instrument:
    return Instrument(f"kvatlas.{name}", unit, description, Kind.GAUGE)


def _by(instrument: Instrument, attribute: str, **fields: str) -> dict[str, Series]:
    """One reading a field, told apart by the value of one attribute."""
    return {name: Series(instrument, {attribute: value}) for name, value in fields.items()}


def _is(instrument: Instrument, name: str) -> dict[str, Series]:
    """The one field that an instrument is read from."""
    return {name: Series(instrument)}


# ---------------------------------------------------------------- publisher: publishers.counters.PublisherCounters

ENGINE_BATCHES = _counter("publisher.engine.batches", "{batch}", "Batches received from the engine")
ENGINE_EVENTS = _counter("publisher.engine.events", "{event}", "Events received from the engine")
ENGINE_SKIPPED = _counter("publisher.engine.skipped", "{event}", "Engine events left out of an otherwise good batch")
ENGINE_POISON = _counter("publisher.engine.poison", "{payload}", "Payloads that are not understood at all, by reason")
ENGINE_DROPPED = _counter("publisher.dead_letters.dropped", "{payload}", "Poison payloads that could not be kept")
FEED = _counter("publisher.feed", "{incident}", "What happened to the engine's feed")
PUBLISHED_EVENTS = _counter("publisher.events", "{event}", "Index events told")
PUBLISHED_BLOCKS = _counter("publisher.blocks", "{block}", "Blocks told, by change")
PUBLISHED_MARKS = _counter("publisher.marks", "{event}", "Clears, checkpoints and snapshots told, by kind")
OVERFLOWS = _counter("publisher.outbox.overflows", "{overflow}", "Times the outbox was full: all is told anew")
OUTBOX_MESSAGES = _counter("publisher.messages", "{message}", "Messages, by what became of them")
SENT_BYTES = _counter("publisher.sent.bytes", "By", "Bytes of messages sent to the stream, also again")
SEND_FAILURES = _counter("publisher.send.failures", "{failure}", "Why messages had to wait or be sent again")
PUBLISHER_GRANTS = _counter("publisher.grants", "{request}", "Requests to send a large snapshot, by answer")
CONTROL_REQUESTS = _counter("publisher.control", "{request}", "Requests received on the control subject, by kind")
PULSES = _counter("publisher.heartbeats", "{heartbeat}", "Heartbeats sent")
YIELDS = _counter("publisher.yields", "{yield}", "Times that a newer publisher of the same worker was heard")
LOAD_SAMPLES = _counter("publisher.load.samples", "{sample}", "Readings of the engine's health and metrics, by outcome")
SAVES = _counter("publisher.saves", "{save}", "Savings of the ledger, by outcome")

PUBLISHER = {
    **_is(ENGINE_BATCHES, "engine_batches"),
    **_is(ENGINE_EVENTS, "engine_events"),
    **_is(ENGINE_SKIPPED, "skipped_events"),
    **_by(
        ENGINE_POISON,
        "reason",
        poison_malformed="malformed",
        poison_oversized="oversized",
        poison_frames="frames",
    ),
    **_is(ENGINE_DROPPED, "dead_letters_dropped"),
    **_by(
        FEED,
        "incident",
        feed_gaps="gap",
        feed_gaps_filled="gap_filled",
        feed_duplicates="duplicate",
        feed_replays="replay",
        feed_replays_failed="replay_failed",
        feed_restarts="restart",
        feed_started_over="started_over",
        feed_lost="lost",
        feed_unheard="unheard",
    ),
    **_is(PUBLISHED_EVENTS, "events"),
    **_by(PUBLISHED_BLOCKS, "change", blocks_stored="stored", blocks_removed="removed", snapshot_blocks="in_snapshot"),
    **_by(PUBLISHED_MARKS, "kind", clears="cleared", checkpoints="checkpoint", snapshots="snapshot"),
    **_is(OVERFLOWS, "overflows"),
    **_by(OUTBOX_MESSAGES, "step", messages="queued", sends="sent", resends="sent_again", acks="acknowledged"),
    **_is(SENT_BYTES, "sent_bytes"),
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
    **_by(PUBLISHER_GRANTS, "answer", grants_asked="asked", grants_denied="denied", grants_unanswered="unanswered"),
    **_by(
        CONTROL_REQUESTS,
        "kind",
        control_requests="any",
        control_bad="bad",
        snapshot_requests="snapshot",
        snapshot_requests_ignored="snapshot_ignored",
    ),
    **_is(PULSES, "heartbeats"),
    **_is(YIELDS, "yields"),
    **_by(LOAD_SAMPLES, "outcome", load_samples="read", load_failures="failed"),
    **_by(SAVES, "outcome", saves="saved", saves_failed="failed"),
}

# ---------------------------------------------------------------- ledger: publishers.ledger_counters.LedgerCounters

LEDGER_BLOCKS = _counter("ledger.blocks", "{block}", "Blocks that the engine stored and removed, by change")
LEDGER_SKIPPED = _counter("ledger.skipped", "{block}", "Blocks that can't be told to the index, by reason")
LEDGER_HOLES = _counter("ledger.holes", "{block}", "Blocks withdrawn for a missing ancestor, and told again")
LEDGER_JUDGED = _counter(
    "ledger.removals.judged", "{block}", "Removals of a hash that stands for several blocks, any of which may have gone"
)
LEDGER_CLEARED = _counter("ledger.cleared", "{event}", "Times the engine cleared a tier")
LEDGER_FORGOTTEN = _counter("ledger.forgotten", "{lineage}", "Lineages of evicted blocks forgotten for want of room")
LEDGER_LEARNED = _counter("ledger.block_size.learned", "{event}", "Times the block size was learned from events")

LEDGER = {
    **_by(LEDGER_BLOCKS, "change", stored="stored", removed="removed"),
    **_is(LEDGER_JUDGED, "judged_removals"),
    **_is(LEDGER_CLEARED, "cleared_events"),
    **_by(
        LEDGER_SKIPPED,
        "reason",
        removed_unknown="removed_unknown",
        unknown_parent="unknown_parent",
        unindexable="unindexable",
        other_block_size="other_block_size",
        placeholder_unknown="placeholder_unknown",
    ),
    **_by(LEDGER_HOLES, "change", withdrawn="withdrawn", restored="restored"),
    **_is(LEDGER_FORGOTTEN, "forgotten"),
    **_is(LEDGER_LEARNED, "block_size_learned"),
}

# ---------------------------------------------------------------- indexer: indexer.counters.IndexerCounters

READ_MESSAGES = _counter("indexer.read.messages", "{message}", "Messages read from the stream")
READ_BYTES = _counter("indexer.read.bytes", "By", "Bytes of messages read from the stream")
READINGS = _counter("indexer.readings", "{reading}", "Readings of a partition, by what happened to them")
INDEXER_POISON = _counter("indexer.poison", "{message}", "Messages refused before the index, by reason")
DEAD_LETTERS_DROPPED = _counter("indexer.dead_letters.dropped", "{message}", "Refused messages that could not be kept")
STORE_CALLS = _counter("indexer.store.calls", "{call}", "Calls that applied messages to the index")
STORE_ERRORS = _counter("indexer.store.errors", "{call}", "Calls that the store did not answer; they are repeated")
STORE_FULL = _counter("indexer.store.full", "{call}", "Calls for which the store was out of memory: an alarm")
INDEXED_MESSAGES = _counter("indexer.messages", "{message}", "Messages given to the index, by outcome")
LAG = _counter("indexer.lag.time", "ms", "Time from a message's making to its being applied, summed over messages")
LAG_MESSAGES = _counter("indexer.lag.messages", "{message}", "Messages whose lag is in `indexer.lag.time`")
SNAPSHOT_REQUESTS = _counter("indexer.snapshot.requests", "{request}", "Snapshots asked from publishers, by outcome")
GRANTS = _counter("indexer.grants", "{request}", "Publishers' requests to send a large snapshot, by answer")
HEARTBEATS = _counter("indexer.heartbeats", "{heartbeat}", "Heartbeats of workers, by validity")
FLEET_WRITES = _counter("indexer.fleet.writes", "{write}", "Fleet records written")
LIVENESS = _counter("indexer.liveness", "{worker}", "Workers judged, by change")
PARTITION_MOVES = _counter("indexer.partitions", "{partition}", "Partitions taken, given up and lost")
SWEEPS = _counter("indexer.sweeps", "{sweep}", "Sweeps of retired holders")
SCOPES_FORGOTTEN = _counter("indexer.scopes.forgotten", "{scope}", "Scopes that nobody used any more")
SCRUBS = _counter("indexer.scrubs", "{scrub}", "Rounds in which all of a shard's holders were recounted")
SCRUBBED = _counter("indexer.scrub.workers", "{worker}", "Workers recounted against their digest, by what was found")
STRAYS = _counter("indexer.scrub.strays", "{entry}", "Entries of nobody that a scrub took out of blocks")

INDEXER = {
    **_is(READ_MESSAGES, "messages_read"),
    **_is(READ_BYTES, "bytes_read"),
    **_by(READINGS, "change", readings_started="started", readings_broken="broken", new_streams="new_stream"),
    **_by(
        INDEXER_POISON,
        "reason",
        poison_malformed="malformed",
        poison_version="version",
        poison_oversized="oversized",
        poison_scope="scope",
        poison_wrong_subject="wrong_subject",
        poison_wrong_partition="wrong_partition",
    ),
    **_is(DEAD_LETTERS_DROPPED, "dead_letters_dropped"),
    **_is(STORE_CALLS, "calls"),
    **_is(STORE_ERRORS, "store_errors"),
    **_is(STORE_FULL, "store_full"),
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
    **_is(LAG, "event_lag.sum_ms"),
    **_is(LAG_MESSAGES, "event_lag.count"),
    **_by(
        SNAPSHOT_REQUESTS,
        "outcome",
        snapshots_asked="asked",
        snapshots_unanswered="unanswered",
        snapshots_refused="refused",
    ),
    **_by(GRANTS, "answer", grants_given="given", grants_refused="refused"),
    **_by(HEARTBEATS, "validity", heartbeats="good", heartbeats_bad="bad"),
    **_is(FLEET_WRITES, "fleet_writes"),
    **_by(LIVENESS, "change", workers_lost="lost", workers_retired="retired", retirements_held="retirement_held"),
    **_by(PARTITION_MOVES, "change", partitions_taken="taken", partitions_given="given", leases_lost="lost"),
    **_is(SWEEPS, "sweeps"),
    **_is(SCOPES_FORGOTTEN, "scopes_forgotten"),
    **_is(SCRUBS, "scrubs"),
    **_by(SCRUBBED, "found", scrub_checked="any", scrub_damaged="damage", scrub_given_up="no_rest"),
    **_is(STRAYS, "scrub_strays"),
}

# ---------------------------------------------------------------- replica: indexer.gauges.ReplicaGauges

PARTITIONS_OWNED = _gauge("indexer.partitions.owned", "{partition}", "Partitions that this replica owns")
MESSAGES_PENDING = _gauge("indexer.pending", "{message}", "Messages of owned partitions that are not applied yet")
WORKERS = _gauge("indexer.workers", "{worker}", "Workers of owned partitions, by liveness")
IN_DOUBT = _gauge("indexer.workers.in_doubt", "{worker}", "Workers of owned partitions whose residency is in doubt")
WITHOUT_ROOM = _gauge("indexer.workers.without_room", "{worker}", "Workers left out because the store is out of memory")
OUT_OF_MEMORY = _gauge(
    "indexer.store.out_of_memory", "{shard}", "Owned shards whose store has no memory left: an alarm"
)
EVICTING = _gauge("indexer.store.evicting", "{shard}", "Owned shards whose store evicts keys by itself: an alarm")
RETIRED_HOLDERS = _gauge("indexer.holders.retired", "{holder}", "Retired holders that are not swept yet")
GRANTED_BYTES = _gauge("indexer.grants.bytes", "By", "Bytes of snapshots that publishers may send now")

REPLICA = {
    **_is(PARTITIONS_OWNED, "partitions_owned"),
    **_is(MESSAGES_PENDING, "messages_pending"),
    **_by(WORKERS, "liveness", workers_alive="alive", workers_lost="lost"),
    **_is(IN_DOUBT, "workers_in_doubt"),
    **_is(WITHOUT_ROOM, "workers_without_room"),
    **_is(OUT_OF_MEMORY, "shards_out_of_memory"),
    **_is(EVICTING, "shards_evicting"),
    **_is(RETIRED_HOLDERS, "retired_holders"),
    **_is(GRANTED_BYTES, "granted_snapshot_bytes"),
}

# ---------------------------------------------------------------- index: kvatlas.residency.IndexMetrics

INDEX_BLOCKS = _gauge("index.size", "{residency}", "Residencies in the index: one a block, worker and tier")
INDEX_BYTES = _gauge("index.bytes", "By", "KV cache bytes that the index describes")
INDEX_CHANGES = _counter("index.changes", "{residency}", "Residencies put into and taken out of the index, by change")
INDEX_SCANS = _counter("index.prefix_scans", "{scan}", "Overlap and children questions answered")
INDEX_WRITTEN = _counter("index.written", "By", "Key and value bytes of block entries sent to the store")

INDEX = {
    **_is(INDEX_BLOCKS, "resident_blocks"),
    **_is(INDEX_BYTES, "resident_bytes"),
    **_by(INDEX_CHANGES, "change", puts="put", removes="remove"),
    **_is(INDEX_SCANS, "prefix_scans"),
    **_is(INDEX_WRITTEN, "bytes_written"),
}

# ---------------------------------------------------------------- router: router_client.counters.RouterCounters

DECISIONS = _counter("router.decisions", "{decision}", "Requests to be routed, by outcome")
LOOKUPS = _counter("router.lookups", "{call}", "Overlap questions asked of the index")
DECISION_TIME = _counter("router.decision.time", "us", "Time spent on decisions, summed over them")
PROMPT_BLOCKS = _counter("router.blocks.required", "{block}", "Blocks of the routed prompts")
OVERLAP_BLOCKS = _counter(
    "router.blocks.overlap", "{block}", "Blocks of the routed prompts that the picked worker held"
)
WITHOUT_INDEX = _counter("router.decisions.without_index", "{decision}", "Decisions without the index, by what instead")
SHADOWED = _counter(
    "router.decisions.shadow", "{decision}", "Decisions that followed another policy, and how many agreed"
)
ROUTER_FAILURES = _counter("router.store.failures", "{call}", "Calls that the store did not answer in time, by part")
RESERVATIONS = _counter("router.reservations", "{reservation}", "Reservations made and ended")
LEASES_LAPSED = _counter(
    "router.leases.lapsed", "{lease}", "Times that a router's lease was over, and its reservations"
)
IN_FLIGHT_TOKENS = _counter(
    "router.tokens.in_flight", "{token}", "Prompt tokens counted as held because the picked worker was computing them"
)
PAIRS = _counter("router.decisions.pairs", "{decision}", "Decisions with a worker for the prompt alone")
OVER_LIMITS = _counter(
    "router.decisions.over_limits", "{decision}", "Decisions for a worker without room or that misses the SLO, by limit"
)
LEARNED = _counter("router.learned", "{request}", "Finished requests by what they told of their worker's rates")

ROUTER = {
    **_by(DECISIONS, "outcome", routed="routed", no_workers="no_workers"),
    **_by(WITHOUT_INDEX, "instead", by_load="load", by_prefix_hash="prefix_hash"),
    **_by(SHADOWED, "outcome", followed="followed", agreed="agreed"),
    **_by(ROUTER_FAILURES, "part", index_failures="index", booking_failures="reservations"),
    **_by(RESERVATIONS, "change", booked="booked", released="released"),
    **_is(LEASES_LAPSED, "lapsed"),
    **_is(IN_FLIGHT_TOKENS, "predicted_tokens"),
    **_is(PAIRS, "pairs"),
    **_by(OVER_LIMITS, "limit", no_room="room", over_slo="slo"),
    **_by(LEARNED, "outcome", learned="learned", said_nothing="nothing"),
    **_is(LOOKUPS, "lookups"),
    **_is(DECISION_TIME, "decision_time_us"),
    **_is(PROMPT_BLOCKS, "required_blocks"),
    **_is(OVERLAP_BLOCKS, "overlap_blocks"),
}

# ---------------------------------------------------------------- rates: kvatlas.cost.learned_rates.LearnedRates

RATE_REQUESTS = _gauge("router.rates.requests", "{request}", "Requests that a worker's rates were learned from")
PREFILL_RATE = _gauge("router.rates.prefill", "us", "Learned: time to compute a prompt token")
STEP_RATE = _gauge("router.rates.step", "us", "Learned: time of a decode step, without what each request adds")
OVERHEAD = _gauge("router.rates.overhead", "us", "Learned: time before a first token besides its prefill")
RATE_ERROR = _gauge("router.rates.error", "1", "How far off expected times were lately, relative")

RATES = {
    **_is(RATE_REQUESTS, "requests"),
    **_is(PREFILL_RATE, "rates.prefill_us_per_token"),
    **_is(STEP_RATE, "rates.tpot_base_us"),
    **_is(OVERHEAD, "overhead_us"),
    **_by(RATE_ERROR, "of", first_error="first token", next_error="next token"),
}

# ---------------------------------------------------------------- proxy: router_client.proxy.counters.ProxyCounters

PROXY_REQUESTS = _counter("proxy.requests", "{request}", "Requests for which a worker was to be found")
PROXY_ENDS = _counter("proxy.ends", "{request}", "How requests ended")
PROXY_RETRIES = _counter("proxy.retries", "{try}", "Tries that ended with another worker, by reason")
PROXY_UNTOKENIZED = _counter("proxy.untokenized", "{request}", "Requests routed without their token ids")
PROXY_SENT = _counter("proxy.sent", "{try}", "Requests sent to engines, tries counted each")
PROXY_WAIT = _counter("proxy.wait.time", "us", "Time from a request's arrival to its being sent, summed over tries")
PROXY_HELD = _counter("proxy.held", "{booking}", "Workers booked over HTTP, by what became of them")

PROXY = {
    **_is(PROXY_REQUESTS, "requests"),
    **_by(
        PROXY_ENDS,
        "end",
        answered="answered",
        gave_up="gave_up",
        shed="shed",
        gone="client_gone",
        broken="engine_gone",
    ),
    **_by(PROXY_RETRIES, "reason", refused="refused", unreachable="unreachable"),
    **_is(PROXY_UNTOKENIZED, "untokenized"),
    **_is(PROXY_SENT, "sent"),
    **_is(PROXY_WAIT, "wait_us"),
    **_by(PROXY_HELD, "change", held="booked", held_done="done", held_expired="expired"),
}

# ---------------------------------------------------------------- tokens: router_client.tokens.counters.TokenCounters

TOKENIZED = _counter("tokens.requests", "{request}", "Requests by how their token ids were found, or why not")
TOKENIZE_TIME = _counter("tokens.time", "us", "Time spent waiting for token ids, summed over requests")

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
    **_is(TOKENIZE_TIME, "time_us"),
}

# ---------------------------------------------------------------- answers: kvatlas.answers.AnswerCounts

PROMPTS_COMPARED = _counter("tokens.prompts", "{request}", "Prompt lengths that engines told beside ours")
CACHED_COMPARED = _counter("tokens.cached", "{request}", "Cached tokens beside the predicted ones, by why they deviate")
PREDICTED_TOKENS = _counter("tokens.predicted", "{token}", "Prompt tokens predicted to be cached, where engines tell")
CACHED_TOKENS = _counter("tokens.found", "{token}", "Prompt tokens that engines found cached")

ANSWERS = {
    **_by(PROMPTS_COMPARED, "outcome", prompts_equal="equal", prompts_differ="different"),
    **_by(
        CACHED_COMPARED,
        "outcome",
        cached_equal="equal",
        cached_other_tokens="other_tokens",
        cached_without_index="without_index",
        cached_newer="newer",
        cached_unconfirmed="unconfirmed",
        cached_evicted="evicted",
        cached_untold="untold",
    ),
    **_is(PREDICTED_TOKENS, "predicted_tokens"),
    **_is(CACHED_TOKENS, "cached_tokens"),
}

INSTRUMENTS: dict[str, dict[str, Series]] = {
    "publisher": PUBLISHER,
    "ledger": LEDGER,
    "indexer": INDEXER,
    "replica": REPLICA,
    "index": INDEX,
    "router": ROUTER,
    "rates": RATES,
    "proxy": PROXY,
    "tokens": TOKENS,
    "answers": ANSWERS,
}
"""Group -> field of the group's counters (dots lead into fields) -> how it is read."""

TOTALS: dict[str, set[str]] = {"publisher": {"poison"}}
"""Fields that are not exported, because they are the sum of others that are."""
