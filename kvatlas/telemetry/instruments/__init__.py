"""The metrics of kvatlas: their names, units and descriptions, and the plain integers behind them. The metric names that
dashboards of endpoint pickers expect are in `router/gateway/field_metrics.py`.

Adding to a counter with attributes takes 5 us, adding to a plain integer 0.03 us. Hot paths therefore count in dataclasses of
integers and register these once (`kvatlas.telemetry.export_metrics`); observable instruments read them when an exporter asks.
Each group has one table for its dataclass: field -> series, that is, an instrument plus the attributes that distinguish the
field from the instrument's other fields.
"""

from kvatlas.telemetry.instruments.conventions import HTTP_REQUEST, MESSAGES_IN, MESSAGES_OUT, STORE_CALL
from kvatlas.telemetry.instruments.indexer import INDEX, INDEX_WORK, INDEXER, PARTITION, REPLICA, STORE
from kvatlas.telemetry.instruments.instrument import Instrument, Kind, Series
from kvatlas.telemetry.instruments.process import HTTP, PROCESS
from kvatlas.telemetry.instruments.publisher import ENGINE, LEDGER, PUBLISHER
from kvatlas.telemetry.instruments.router import ANSWERS, INDEX_REPLICA, INDEX_REPLICA_NOW, RATES, ROUTER
from kvatlas.telemetry.instruments.servers import (
    EJECTED,
    EJECTION,
    FOLLOWING,
    GATEWAY,
    GATEWAY_LOAD,
    PROGRESS,
    PROXY,
    PROXY_LOAD,
    QUERIES,
    STALLED,
    TENANCY,
    TOKENS,
)

__all__ = ["INSTRUMENTS", "NOT_EXPORTED", "Instrument", "Kind", "Series"]

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
    "ejections": EJECTION,
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
"""Group -> field of the group's counters (a dot descends into a nested field) -> the field's series."""

NOT_EXPORTED: dict[str, set[str]] = {
    "publisher": {
        "engine_batches",
        "poison",
        "clears",
        "checkpoints",
        "snapshots",
        "sent_bytes",
        "saves",
        "grants_asked",
    }
    | {"grants_denied", "grants_unanswered", "store_notices", "store_notices_lost", "snapshot_requests"}
    | {"snapshot_requests_ignored"},
    "engine": {"state"},
    "ledger": {"cleared_events", "withdrawn", "restored", "judged_removals"},
    "indexer": {"messages_read", "readings_started", "readings_broken", "new_streams", "fleet_writes"}
    | {"partitions_taken", "partitions_given", "leases_lost", "sweeps", "scopes_forgotten", "scrubs", "scrub_strays"},
    "replica": {"retired_holders"},
    "index_work": {"puts", "removes", "prefix_scans"},
    "index_replica": {"loads", "resumed", "losses", "saves", "save_failures", "verified", "messages_read"}
    | {"refused"},
    "rates": {"overhead_us", "requests"},
    "proxy": {"requests", "sent", "untokenized"},
}
"""Group -> fields that are not exported, because other fields or another group hold the same data, or because the JSON of the
status page is enough. Counts of damage, and of faulty input from other processes, are exported."""
