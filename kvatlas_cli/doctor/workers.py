"""Workers: what indexers wrote of them, what they tell now, and what the index has of them, side by side."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvatlas.fleet.records import EngineState, FleetRecord, Heartbeat, Liveness, Role
from kvatlas.index.protocol import WorkerRecord
from kvatlas.reservations.protocol import STALE_US
from kvatlas_cli.doctor.finding import Finding, Level, listed

MOST_SILENT_US = 5_000_000
"""Without NATS a heartbeat is judged by when an indexer heard it."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat, and when it came, by our clock."""

    beat: Heartbeat
    at_us: int


def judge_workers(
    fleet: Mapping[str, FleetRecord],
    fences: Mapping[str, WorkerRecord] | None,
    heard: Mapping[str, Heard] | None,
    *,
    behind: Iterable[str] = (),
    listened_s: float,
    now_us: int,
) -> Iterator[Finding]:
    """`fences`: the index's records, None where they could not be read; `heard`: None where NATS was not reached;
    `behind`: those whose record did not reach what they tell while we waited."""
    if not fleet and not heard:
        yield Finding(
            "workers.heartbeats", Level.WARNING, "no worker is known", "start `kvatlas publish` beside each engine"
        )
        return
    yield from _pulse(fleet, heard, listened_s, now_us)
    yield from _states(fleet)
    yield from _records(fleet, fences, set(behind))
    yield from _load(fleet)
    yield from _endpoints(fleet)


def is_behind(beat: Heartbeat, fence: WorkerRecord | None) -> bool:
    """Does the index lack what this worker's stream has?"""
    known = (-1, -1) if fence is None else (fence.incarnation, fence.seq)
    return beat.acked_seq >= 0 and (beat.incarnation, beat.acked_seq) > known


def judge_pools(pools: Mapping[str, Sequence[FleetRecord]]) -> Iterator[Finding]:
    """Pools by how they are called in a line."""
    tokenizers: dict[str, set[str]] = defaultdict(set)
    for name, records in pools.items():
        endpoints = [record.endpoint for record in records]
        for endpoint in endpoints:
            tokenizers[endpoint.model_id].add(endpoint.tokenizer_id)
        sizes = sorted({endpoint.block_size for endpoint in endpoints if endpoint.block_size})
        if len(sizes) > 1:
            line = f"{name} has blocks of {', '.join(map(str, sizes))} tokens"
            advice = "right, but each prompt is hashed once for each size; one size saves that"
            yield Finding("pools.block_sizes", Level.INFO, line, advice)
        roles = {endpoint.role for endpoint in endpoints}
        if roles and Role.BOTH not in roles and len(roles) == 1:
            line = f"{name} has workers of the role {next(iter(roles)).value} only"
            yield Finding("pools.roles", Level.WARNING, line, "requests need both: start workers of the other role")
    for model_id, ids in tokenizers.items():
        if len(ids) > 1:
            line = f"model {model_id} is served under {len(ids)} tokenizers ({listed(ids)}): pools that share nothing"
            yield Finding(
                "pools.tokenizers", Level.INFO, line, "where it is one, give all publishers the same --tokenizer-id"
            )


def _pulse(
    fleet: Mapping[str, FleetRecord], heard: Mapping[str, Heard] | None, listened_s: float, now_us: int
) -> Iterator[Finding]:
    check = "workers.heartbeats"
    if heard is None:
        old = [id for id, record in fleet.items() if now_us - record.heard_us > MOST_SILENT_US]
        silent, how = old, "not heard by an indexer for 5 s"
    else:
        silent, how = [id for id in fleet if id not in heard], f"without a heartbeat in {listened_s:g} s"
        unknown = [id for id in heard if id not in fleet]
        if unknown:
            line = f"heard, but written down by no indexer: {listed(unknown)}"
            yield Finding(check, Level.ERROR, line, "is an indexer running, on the same NATS and store?")
    lost = [id for id, record in fleet.items() if record.liveness is Liveness.LOST and id not in silent]
    if silent:
        line = f"{len(silent)} of {len(fleet)} workers {how}: {listed(silent)}"
        advice = "is `kvatlas publish` running there, and does it reach NATS? They are forgotten after a minute"
        yield Finding(check, Level.ERROR, line, advice)
    if lost:
        line = f"heard, but lost to the indexers: {listed(lost)}"
        yield Finding(check, Level.ERROR, line, "does an indexer hold their partitions, and hear NATS? See its log")
    if not silent and not lost and fleet:
        yield Finding(check, Level.OK, f"{len(fleet)} of {len(fleet)} workers heard")


def _states(fleet: Mapping[str, FleetRecord]) -> Iterator[Finding]:
    states: dict[EngineState, list[str]] = defaultdict(list)
    for id, record in fleet.items():
        states[record.state].append(id)
    for state, level, advice in (
        (EngineState.DOWN, Level.ERROR, "look at the engine's log, and at the publisher's --engine-url"),
        (EngineState.ASLEEP, Level.INFO, "routers send nothing there until it is woken"),
        (EngineState.DRAINING, Level.INFO, "its publisher is stopping; routers send nothing there"),
    ):
        if ids := states.get(state):
            yield Finding("workers.engines", level, f"engines {state.value}: {listed(ids)}", advice)
    if up := states.get(EngineState.UP):
        yield Finding("workers.engines", Level.OK, f"{len(up)} of {len(fleet)} engines are up")


def _records(
    fleet: Mapping[str, FleetRecord], fences: Mapping[str, WorkerRecord] | None, behind: set[str]
) -> Iterator[Finding]:
    check = "workers.index"
    if fences is None:
        return
    full = [id for id, fence in fences.items() if fence.oom]
    bad = [id for id, fence in fences.items() if fence.bad and not fence.oom and id in fleet]
    loading = [id for id, fence in fences.items() if fence.loading and not fence.bad]
    late = sorted(behind - {*full, *bad, *loading})
    if full:
        line = f"left out of the index, the store has no room for them: {listed(full)}"
        yield Finding(check, Level.ERROR, line, "raise the store's maxmemory")
    if bad:
        line = f"in doubt, their snapshot is awaited: {listed(bad)}"
        yield Finding(
            check, Level.WARNING, line, "look again in 10 s; if it stays, see the indexer's and publisher's log"
        )
    if loading:
        line = f"being told anew: {listed(loading)}"
        yield Finding(check, Level.INFO, line, "they answer with what was known before, until their snapshot ends")
    if late:
        line = f"the index lacks what these told: {listed(late)}"
        advice = "if it stays so: are the indexers busy (event_lag in /status), do they read this NATS?"
        yield Finding(check, Level.ERROR, line, advice)
    if not full and not bad and not late and fleet:
        yield Finding(check, Level.OK, "the index has all that was told")


def _load(fleet: Mapping[str, FleetRecord]) -> Iterator[Finding]:
    up = {id: record for id, record in fleet.items() if record.routable}
    none = [id for id, record in up.items() if record.load is None]
    old = [id for id, record in up.items() if (record.load_age_us or 0) > STALE_US]
    if none:
        line = f"without load: {listed(none)}; taken for as busy as the others"
        advice = "give the publisher --engine-url; SGLang needs --enable-metrics"
        yield Finding("workers.load", Level.WARNING, line, advice)
    if old:
        line = f"load older than {STALE_US / 1e6:g} s: {listed(old)}"
        yield Finding("workers.load", Level.WARNING, line, "does the engine's /metrics answer within 2 s?")
    if up and not none and not old:
        yield Finding("workers.load", Level.OK, f"{len(up)} of {len(up)} routable workers with load")


def _endpoints(fleet: Mapping[str, FleetRecord]) -> Iterator[Finding]:
    endpoints = [record.endpoint for record in fleet.values()]
    nowhere = [one.id for one in endpoints if not one.url]
    silent = [one.id for one in endpoints if not one.events]
    uncut = [one.id for one in endpoints if not one.events and one.block_size is None]
    quiet = [one.id for one in endpoints if one.events and one.block_size is None]
    if nowhere:
        line = f"without an address: {listed(nowhere)}"
        yield Finding("workers.address", Level.WARNING, line, "give the publisher --advertise-url, or --engine-url")
    if silent:
        line = f"without events, what they hold is only predicted: {listed(silent)}"
        yield Finding("workers.events", Level.INFO, line, "start the engine with --kv-events-config")
    if uncut:
        line = f"with neither events nor a block size, so that nothing is predicted: {listed(uncut)}"
        yield Finding("workers.block_size", Level.WARNING, line, "give the publisher --block-size")
    if quiet:
        line = f"block size not told yet: {listed(quiet)}"
        yield Finding("workers.block_size", Level.INFO, line, "it comes with the first event, or give --block-size")
