"""Compares workers' fleet records, their current heartbeats, and their records in the index."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from kvatlas.errors import InvalidValue
from kvatlas.fleet.identities import Identities, TenantRefused
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Heartbeat, Liveness
from kvatlas.fleet_store.departures import Departure
from kvatlas.identity import instance_of
from kvatlas.index.protocol import WorkerRecord
from kvatlas.reservations.protocol import STALE_US
from kvatlas.version import own_version
from kvatlas_cli.doctor.finding import Finding, Level, join_names
from kvatlas_cli.output import count_text

MAX_SILENT_US = 5_000_000
"""Longest silence that is allowed for a worker. Without NATS, it is measured from the last heartbeat that an indexer
heard."""
STARTING_S = 600
"""How long an engine that has never been up may still be loading its model."""
MOST_ALIKE = 8
"""Maximum number of diagnoses with the same cure that are shown in full."""


def judge_workers(
    fleet: Mapping[str, FleetRecord],
    index_records: Mapping[str, WorkerRecord] | None,
    heard: Mapping[str, Heartbeat] | None,
    *,
    nats: str = "",
    behind: Iterable[str] = (),
    listened_s: float,
    now_us: int,
) -> Iterator[Finding]:
    """`index_records`: None if they could not be read. `heard`: None if NATS is unreachable. `nats`: the server's
    displayed name. `behind`: workers whose index record did not catch up with their heartbeat while we waited."""
    if not fleet and not heard:
        yield Finding(
            "workers.heartbeats", Level.WARNING, "no worker is known", "start `kvatlas publish` beside each engine"
        )
        return
    yield from _judge_heartbeats(fleet, heard, nats, listened_s, now_us)
    yield from _judge_diagnoses(heard or {})
    yield from _judge_versions(heard or {})
    yield from _judge_engines(fleet, heard or {})
    yield from _judge_index_records(fleet, index_records, set(behind))
    yield from _judge_load(fleet)
    yield from _judge_endpoints(fleet)
    yield from _judge_stores(fleet)


def judge_missing(
    fleet: Collection[str], departures: Mapping[str, Departure], expected: Mapping[str, str], store_us: int
) -> Iterator[Finding]:
    """Workers that are not in the fleet: those retired within the hour, and those `expected`, each with a remark or ''."""
    check = "workers.missing"
    gone = {id: one for id, one in departures.items() if id not in fleet}
    silent = [id for id, one in gone.items() if not one.drained]
    drained = [id for id in gone if id not in silent and id not in expected]
    there = {*fleet, *silent, *(instance_of(id) for id in (*fleet, *silent))}
    never = [f"{id} ({why})" if why else id for id, why in expected.items() if id not in there]
    if silent:
        since_s = (store_us - max(gone[id].at_us for id in silent)) / 1e6
        models = join_names({gone[id].model_id for id in silent})
        line = (
            f"{count_text(len(silent), 'worker')} of {models} that fell silent within the last hour is missing: "
            if len(silent) == 1
            else f"{len(silent)} workers of {models} that fell silent within the last hour are missing: "
        )
        line += f"{join_names(silent)} (the last one was retired {since_s:,.0f} s ago)"
        yield Finding(check, Level.ERROR, line, "start `kvatlas publish` there again; after an hour they are forgotten")
    if never:
        line = f"expected workers are missing: {join_names(never)}"
        yield Finding(check, Level.ERROR, line, "start their engines and `kvatlas publish`, or change what is expected")
    if drained:
        line = f"workers that drained and left within the last hour: {join_names(drained)}"
        yield Finding(check, Level.INFO, line, "nothing to do if they were removed on purpose")
    if not silent and not never:
        yield Finding(check, Level.OK, "no worker is missing")


def judge_duplicates(heard: Mapping[str, Heartbeat], yielded: Mapping[str, Heartbeat]) -> Iterator[Finding]:
    """Find workers that have two publishers. `yielded`: heartbeats of publishers that yielded to another one."""
    for worker_id, one in sorted(yielded.items()):
        silent = one.endpoint.url or "an unknown address"
        counts = heard[worker_id].endpoint.url if worker_id in heard else ""
        line = (
            f"{worker_id} has two publishers: the one of {counts or 'an unknown address'} counts; the one of {silent} is "
            "ignored, and so is its engine"
        )
        advice = "give each its own --worker-id; publishers of different fleets need different NATS servers or accounts"
        yield Finding("workers.duplicates", Level.ERROR, line, advice)


def is_behind(heartbeat: Heartbeat, record: WorkerRecord | None) -> bool:
    """True if the index has not yet applied all of the worker's messages in the stream."""
    applied = (-1, -1) if record is None else (record.incarnation, record.seq)
    return heartbeat.acked_seq >= 0 and (heartbeat.incarnation, heartbeat.acked_seq) > applied


def judge_identities(heard: Iterable[Heartbeat], identities: Identities) -> Iterator[Finding]:
    """Find workers that the indexers refuse."""
    for one in heard:
        try:
            identities.check_endpoint(one.endpoint)
        except InvalidValue as error:
            advice = "change what its publisher advertises, or the identities (`kvatlas auth nats`)"
            tenant = f", {error.tenant_id}" if isinstance(error, TenantRefused) else ""
            yield Finding("workers.identity", Level.ERROR, f"the indexers refuse it: {error}{tenant}", advice)


def _judge_heartbeats(
    fleet: Mapping[str, FleetRecord],
    heard: Mapping[str, Heartbeat] | None,
    nats: str,
    listened_s: float,
    now_us: int,
) -> Iterator[Finding]:
    check = "workers.heartbeats"
    if heard is None:
        silent = [id for id, record in fleet.items() if now_us - record.heard_us > MAX_SILENT_US]
        how = "not heard by an indexer for 5 s"
    else:
        silent, how = [id for id in fleet if id not in heard], f"without a heartbeat in {listened_s:g} s"
        unknown = [id for id in heard if id not in fleet]
        if unknown:
            line = f"workers send heartbeats but have no fleet record: {join_names(unknown)}"
            yield Finding(check, Level.ERROR, line, "is an indexer running on the same NATS and store?")
    drained = [id for id in silent if fleet[id].state is EngineState.DRAINING]
    silent = [id for id in silent if id not in drained]
    lost = [id for id, record in fleet.items() if record.liveness is Liveness.LOST and id not in silent + drained]
    if drained:
        line = f"workers that drained and stopped: {join_names(drained)}"
        yield Finding(check, Level.INFO, line, "routers skip them, and indexers retire them after a minute")
    if silent:
        line = f"{len(silent)} of {len(fleet)} workers {how}: {join_names(silent)}"
        advice = f"is `kvatlas publish` running there, and connected to {nats or 'NATS'}? Indexers retire them after a minute"
        yield Finding(check, Level.ERROR, line, advice)
    if lost:
        line = f"workers send heartbeats but the indexers count them as lost: {join_names(lost)}"
        yield Finding(
            check, Level.ERROR, line, "does an indexer own their partitions, and does it reach NATS? See its log"
        )
    if not silent and not lost and fleet:
        heard_count = len(fleet) - len(drained)
        yield Finding(check, Level.OK, f"{heard_count} of {heard_count} workers heard")


def _judge_diagnoses(heard: Mapping[str, Heartbeat]) -> Iterator[Finding]:
    """Publishers' own diagnoses. Identical ones are grouped; only the first few with the same cure are shown in full."""
    by_cure: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for id, one in sorted(heard.items()):
        for diagnosis in one.diagnoses:
            by_cure[diagnosis.name, diagnosis.cure][diagnosis.seen].append(id)
    for (_, cure), by_seen in by_cure.items():
        shown = list(by_seen.items())
        for seen, ids in shown[:MOST_ALIKE]:
            yield Finding("workers.settings", Level.ERROR, f"{join_names(ids)}: {seen}", cure)
        if more := [id for _, ids in shown[MOST_ALIKE:] for id in ids]:
            yield Finding("workers.settings", Level.ERROR, f"{join_names(more)}: likewise", cure)


def _judge_versions(heard: Mapping[str, Heartbeat]) -> Iterator[Finding]:
    """Find publishers of other versions. Different versions work together; the finding shows where behavior may differ, and
    whether an upgrade is complete."""
    workers: dict[str, list[str]] = defaultdict(list)
    for id, one in heard.items():
        workers[one.version or "before 0.1.0"].append(id)
    if set(workers) - {own_version()}:
        parts = "; ".join(f"{version}: {join_names(ids)}" for version, ids in sorted(workers.items()))
        line = f"publishers of other versions than this kvatlas {own_version()}: {parts}"
        yield Finding(
            "workers.versions", Level.INFO, line, "versions work together; upgrade indexers first, then publishers"
        )


def _judge_engines(fleet: Mapping[str, FleetRecord], heard: Mapping[str, Heartbeat]) -> Iterator[Finding]:
    states: dict[EngineState, list[str]] = defaultdict(list)
    awaited: dict[str, int] = {}
    engines = [id for id, record in fleet.items() if not record.endpoint.is_store]
    for id in engines:
        since_s = heard[id].awaited_s if id in heard else None
        if fleet[id].state is EngineState.DOWN and since_s is not None and since_s < STARTING_S:
            awaited[id] = since_s
        else:
            states[fleet[id].state].append(id)
    if awaited:
        line = f"engines that have not been up yet: {join_names(f'{id} ({s} s)' for id, s in awaited.items())}"
        advice = "loading a model takes minutes; if one is up, its publisher's --engine-url is wrong"
        yield Finding("workers.engines", Level.INFO, line, advice)
    for state, level, advice in (
        (EngineState.DOWN, Level.ERROR, "see the engine's log, and check the publisher's --engine-url"),
        (EngineState.ASLEEP, Level.INFO, "routers skip them until they wake up"),
        (EngineState.DRAINING, Level.INFO, "their publishers are stopping; routers skip them"),
    ):
        if ids := states.get(state):
            yield Finding("workers.engines", level, f"engines {state.value}: {join_names(ids)}", advice)
    if up := states.get(EngineState.UP):
        yield Finding("workers.engines", Level.OK, f"{len(up)} of {len(engines)} engines are up")


def _judge_index_records(
    fleet: Mapping[str, FleetRecord], records: Mapping[str, WorkerRecord] | None, behind: set[str]
) -> Iterator[Finding]:
    check = "workers.index"
    if records is None:
        return
    full = [id for id, record in records.items() if record.oom]
    bad = [id for id, record in records.items() if record.bad and not record.oom and id in fleet]
    loading = [id for id, record in records.items() if record.loading and not record.bad]
    late = sorted(behind - {*full, *bad, *loading})
    if full:
        line = f"workers left out of the index because the store is out of memory: {join_names(full)}"
        yield Finding(check, Level.ERROR, line, "raise the store's maxmemory")
    if bad:
        line = f"workers in doubt, waiting for their snapshot: {join_names(bad)}"
        yield Finding(
            check, Level.WARNING, line, "check again in 10 s; if it persists, see the logs of indexer and publisher"
        )
    if loading:
        line = f"workers whose snapshot is loading: {join_names(loading)}"
        yield Finding(check, Level.INFO, line, "lookups use their previous blocks until it is complete")
    if late:
        line = f"the index is behind these workers: {join_names(late)}"
        advice = "if it persists: are the indexers busy (event_lag in /status), and do they use this NATS?"
        yield Finding(check, Level.ERROR, line, advice)
    if not full and not bad and not late and fleet:
        yield Finding(check, Level.OK, "the index is up to date with every worker")


def _judge_load(fleet: Mapping[str, FleetRecord]) -> Iterator[Finding]:
    up = {id: record for id, record in fleet.items() if record.routable}
    none = [id for id, record in up.items() if record.load is None]
    old = [id for id, record in up.items() if (record.load_age_us or 0) > STALE_US]
    if none:
        line = f"workers without load: {join_names(none)}; routers assume the pool's mean"
        advice = "set the publisher's --engine-url; SGLang needs --enable-metrics"
        yield Finding("workers.load", Level.WARNING, line, _advise_load(fleet, none, advice))
    if old:
        line = f"workers whose load is older than {STALE_US / 1e6:g} s: {join_names(old)}"
        advice = "does the engine's /metrics answer within 2 s?"
        yield Finding("workers.load", Level.WARNING, line, _advise_load(fleet, old, advice))
    if up and not none and not old:
        yield Finding("workers.load", Level.OK, f"{len(up)} of {len(up)} routable workers report load")


def _advise_load(fleet: Mapping[str, FleetRecord], ids: Iterable[str], advice: str) -> str:
    """The advice for a missing load. `advice`: for engines with a metrics page; engines of the open event forms send their
    load themselves."""
    if any(fleet[id].endpoint.kind is EngineKind.OPEN for id in ids):
        return f"{advice}; an engine of the open event forms sends `load` with its batches"
    return advice


def _judge_endpoints(fleet: Mapping[str, FleetRecord]) -> Iterator[Finding]:
    endpoints = [record.endpoint for record in fleet.values() if not record.endpoint.is_store]
    nowhere = [one.id for one in endpoints if not one.url]
    at_address: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for one in (
        record.endpoint for record in fleet.values() if record.routable
    ):  # skips workers that were replaced at their address
        if one.url:
            at_address[one.url, one.dp_rank].append(one.id)
    for (url, _), ids in at_address.items():
        if len(ids) > 1:
            line = f"{join_names(ids)} have the same address, {url}: routers take one engine for several"
            advice = "give each publisher its own engine's --engine-url (or --advertise-url), and ranks --dp-rank"
            yield Finding("workers.address", Level.ERROR, line, advice)
    eventless = [one.id for one in endpoints if not one.events]
    unpredictable = [one.id for one in endpoints if not one.events and one.block_size is None]
    unlearned = [one.id for one in endpoints if one.events and one.block_size is None]
    if nowhere:
        line = f"workers without an address: {join_names(nowhere)}"
        yield Finding("workers.address", Level.WARNING, line, "set the publisher's --advertise-url or --engine-url")
    if eventless:
        line = f"engines without events, whose blocks are only predicted: {join_names(eventless)}"
        yield Finding("workers.events", Level.INFO, line, "start the engine with --kv-events-config")
    if unpredictable:
        line = f"engines without events and block size, whose blocks can't be predicted: {join_names(unpredictable)}"
        yield Finding("workers.block_size", Level.WARNING, line, "set the publisher's --block-size")
    if unlearned:
        line = f"workers whose block size is unknown yet: {join_names(unlearned)}"
        advice = "it is learned from the first event; or set the publisher's --block-size"
        yield Finding("workers.block_size", Level.INFO, line, advice)


def _judge_stores(fleet: Mapping[str, FleetRecord]) -> Iterator[Finding]:
    """Shared stores and the workers that name them. A store with a different pool or block size is useless to a
    worker."""
    check, sound = "workers.stores", True
    stores = {id: record.endpoint for id, record in fleet.items() if record.endpoint.is_store}
    readers: dict[str, list[EngineEndpoint]] = {id: [] for id in stores}
    for record in fleet.values():
        for store_id in record.endpoint.stores:
            readers.setdefault(store_id, []).append(record.endpoint)
    for store_id, named_by in sorted(readers.items()):
        store, names = stores.get(store_id), join_names([one.id for one in named_by])
        if store is None:
            line = f"{names}: --shared-store is {store_id}, which is not published"
            advice = f"start `kvatlas publish --engine store --worker-id {store_id}`"
        elif not named_by:
            line = f"shared store {store_id} is named by no worker"
            advice = "set --shared-store at the publishers of the engines that use it"
        elif wrong := [one.id for one in named_by if not _fits(one, store)]:
            line = f"{join_names(wrong)}: the model or block size differs from that of shared store {store_id}"
            advice = "give each model and block size its own store"
        else:
            continue
        sound = False
        yield Finding(check, Level.ERROR, line, advice)
    if stores and sound:
        yield Finding(check, Level.OK, f"shared stores that workers read: {join_names(sorted(stores))}")


def _fits(reader: EngineEndpoint, store: EngineEndpoint) -> bool:
    return reader.pool_id == store.pool_id and reader.block_size in (None, store.block_size)
