"""Instruments for indexers, and for the index that they write to."""

from kvatlas.telemetry.instruments.instrument import TIERS, by, counter, gauge, histogram, single

# ---------------------------------------------------------------- indexer: kvatlas_indexer.counters.IndexerCounters

INDEXER_POISON = counter("indexer.poison", "{message}", "Messages refused before they reached the index, by reason")
DEAD_LETTERS_DROPPED = counter(
    "indexer.dead_letters.dropped", "{message}", "Refused messages that could not be kept as dead letters"
)
STORE_ERRORS = counter("indexer.store.errors", "{call}", "Apply calls that the store did not answer; they are retried")
STORE_FULL = counter("indexer.store.full", "{call}", "Apply calls refused because the store is out of memory: an alarm")
INDEXED_MESSAGES = counter("indexer.messages", "{message}", "Messages handed to the index, by outcome")
LAG = histogram("indexer.lag", "s", "Age of the oldest message of a batch when it is applied, once for each message")
APPLY_TIME = histogram("indexer.apply.duration", "s", "Calls to the store that apply messages, retries included")
SNAPSHOT_REQUESTS = counter("indexer.snapshot.requests", "{request}", "Snapshots requested from publishers, by outcome")
GRANTS = counter("indexer.grants", "{request}", "Publishers' requests to send a large snapshot, by answer")
HEARTBEATS = counter("indexer.heartbeats", "{heartbeat}", "Heartbeats received, by validity")
POOLS_REPAIRED = counter(
    "indexer.pools.repaired",
    "{repair}",
    "Times that a pool's bookings and loads were dropped because a record was damaged",
)
LIVENESS = counter("indexer.liveness", "{worker}", "Workers whose liveness changed, by change")
SCRUBBED = counter("indexer.scrub.workers", "{worker}", "Workers recounted against their digest, by finding")

INDEXER = {
    **by(
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
        poison_fleet="fleet",
    ),
    **single(DEAD_LETTERS_DROPPED, "dead_letters_dropped"),
    **single(STORE_ERRORS, "store_errors"),
    **single(STORE_FULL, "store_full"),
    **by(
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
    **single(LAG, "event_lag"),
    **single(APPLY_TIME, "apply_time"),
    **by(
        SNAPSHOT_REQUESTS,
        "outcome",
        snapshots_asked="asked",
        snapshots_unanswered="unanswered",
        snapshots_refused="refused",
    ),
    **by(GRANTS, "answer", grants_given="given", grants_refused="refused", grants_bad="bad", grants_excess="excess"),
    **by(
        HEARTBEATS,
        "validity",
        heartbeats="good",
        heartbeats_bad="bad",
        heartbeats_refused="refused",
        heartbeats_excess="excess",
        records_bad="not_written",
    ),
    **single(POOLS_REPAIRED, "pools_repaired"),
    **by(
        LIVENESS,
        "change",
        workers_lost="lost",
        workers_retired="retired",
        retirements_held="retirement_held",
        workers_too_large="too_large",
    ),
    **by(SCRUBBED, "found", scrub_damaged="damage", scrub_given_up="no_rest"),
}

# ---------------------------------------------------------------- replica: kvatlas_indexer.gauges.ReplicaGauges

PARTITIONS = gauge("indexer.partitions.configured", "{partition}", "Partitions of the stream")
PARTITIONS_OWNED = gauge("indexer.partitions.owned", "{partition}", "Partitions owned by this replica")
MESSAGES_PENDING = gauge("indexer.pending", "{message}", "Messages of owned partitions that are not applied yet")
WORKERS = gauge("indexer.workers", "{worker}", "Workers of owned partitions, by liveness")
IN_DOUBT = gauge("indexer.workers.in_doubt", "{worker}", "Workers of owned partitions whose residency is in doubt")
WITHOUT_ROOM = gauge(
    "indexer.workers.without_room", "{worker}", "Workers left out of the index because the store is out of memory"
)
OUT_OF_MEMORY = gauge("indexer.store.out_of_memory", "{shard}", "Owned shards whose store is out of memory: an alarm")
EVICTING = gauge("indexer.store.evicting", "{shard}", "Owned shards whose store evicts keys: an alarm")

REPLICA = {
    **single(PARTITIONS, "partitions"),
    **single(PARTITIONS_OWNED, "partitions_owned"),
    **single(MESSAGES_PENDING, "messages_pending"),
    **by(WORKERS, "liveness", workers_alive="alive", workers_lost="lost"),
    **single(IN_DOUBT, "workers_in_doubt"),
    **single(WITHOUT_ROOM, "workers_without_room"),
    **single(OUT_OF_MEMORY, "shards_out_of_memory"),
    **single(EVICTING, "shards_evicting"),
}

# ---------------------------------------------------------------- partition: kvatlas_indexer.partition.reader.PartitionStatus

PARTITION_PENDING = gauge("indexer.partition.pending", "{message}", "Messages that are not applied yet, by partition")

PARTITION = single(PARTITION_PENDING, "pending")

# ---------------------------------------------------------------- index: kvatlas.blocks.residency.ModelBlocks

INDEX_BLOCKS = gauge(
    "index.size",
    "{residency}",
    "Residencies in the index, one for each block, worker and tier, by tier and model; from one replica only",
)
INDEX_BYTES = gauge(
    "index.bytes", "By", "Bytes of KV cache that the index describes, by tier and model; from one replica only"
)
STORE_MEMORY = gauge(
    "store.memory", "By", "Memory of all primaries of the store, used and allowed; from one replica only"
)
INDEX_WRITTEN = counter("index.written", "By", "Key and value bytes of block entries sent to the store")

INDEX = {
    **by(INDEX_BLOCKS, "tier", **{f"blocks.{tier}": tier for tier in TIERS}),
    **by(INDEX_BYTES, "tier", **{f"bytes.{tier}": tier for tier in TIERS}),
}

# ---------------------------------------------------------------- store: kvatlas_indexer.gauges.StoreGauges

WORKERS_MISSING = gauge(
    "indexer.workers.missing",
    "{worker}",
    "Workers that fell silent within the last hour and are not back; from one replica",
)

STORE = {
    **by(STORE_MEMORY, "what", used_bytes="used", limit_bytes="limit"),
    **single(WORKERS_MISSING, "workers_missing"),
}

# ---------------------------------------------------------------- index of one replica: kvatlas.blocks.residency.IndexWork

INDEX_WORK = {
    **single(INDEX_WRITTEN, "bytes_written"),
}
