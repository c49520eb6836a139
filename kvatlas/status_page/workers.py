"""The workers, for any process that reads the fleet's records: state, blocks by tier, load, last event, and last repair."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.fleet.records import EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.quantities import age_text, count_text
from kvatlas.status_page.content import QUIET_DASH, Cell, Column, Fact, Section, Table, Tone, number_cell

MOST_WORKERS = 64
"""Maximum number of rows; workers that need attention come first."""
LATE_US = 3_000_000
"""A heartbeat is late after this long; after 5 s the worker is lost."""
READS_AT_ONCE = 8

ReadDigest = Callable[[str], Awaitable[Sequence[int] | None]]
"""See `ResidencyIndex.digest`."""

_COLUMNS = (
    Column("worker"),
    Column("state"),
    Column("model"),
    Column("blocks", hint="residencies by tier, as the index has them"),
    Column("running", number=True, hint="requests that the engine runs"),
    Column("waiting", number=True, hint="requests that wait at the engine"),
    Column("cache", hint="use of the engine's KV cache"),
    Column("last event", number=True, hint="since messages of the worker were last applied"),
    Column("last repair", hint="the last snapshot that an indexer requested, and why"),
    Column("heard", number=True, hint="since its last heartbeat"),
    Column("incarnation", number=True),
)


async def workers_section(records: Mapping[str, FleetRecord], digest: ReadDigest) -> Section:
    """Every worker and shared store of the fleet, up to MOST_WORKERS. Raises whatever `digest` raises."""
    now_us = time.time_ns() // 1_000
    order = sorted(records.items(), key=lambda one: (_is_well(one[1]), one[0]))
    shown = order[:MOST_WORKERS]
    held: dict[str, Sequence[int] | None] = {}
    for first in range(0, len(shown), READS_AT_ONCE):
        ids = [worker_id for worker_id, _ in shown[first : first + READS_AT_ONCE]]
        held.update(zip(ids, await asyncio.gather(*map(digest, ids)), strict=True))
    rows = [_row(worker_id, record, held[worker_id], now_us) for worker_id, record in shown]
    left = len(records) - len(shown)
    note = f"{count_text(left, 'more worker')}, in good order; kvatlas workers lists all" if left else ""
    return Section("workers", "Workers", [Table(_COLUMNS, rows, "no worker is published", note)])


def workers_fact(records: Mapping[str, FleetRecord]) -> Fact:
    """The number of workers that may get requests."""
    engines = [record for record in records.values() if not record.endpoint.is_store]
    routable = sum(record.routable for record in engines)
    tone = Tone.GOOD if routable == len(engines) and routable else Tone.WARNING if routable else Tone.BAD
    return Fact("routable workers", Cell(f"{routable:,} of {len(engines):,}", tone))


def blocks_cell(by_tier: Mapping[Tier, int]) -> Cell:
    """Blocks by tier, nearest tier first; empty tiers are left out."""
    parts = [f"{count:,} {tier.label}" for tier, count in sorted(by_tier.items()) if count]
    return Cell(" + ".join(parts)) if parts else Cell("0", Tone.QUIET)


def state_cell(state: EngineState, liveness: Liveness = Liveness.ALIVE, doubt: str = "") -> Cell:
    """The state of a worker. `doubt`: why the index may be wrong about the worker."""
    if liveness is Liveness.LOST:
        return Cell("lost", Tone.BAD, "no heartbeat for 5 s: routers skip it", marked=True)
    if state is EngineState.DOWN:
        return Cell("down", Tone.BAD, "its engine does not answer, or its feed is not connected", marked=True)
    if doubt:
        return Cell("in doubt", Tone.WARNING, doubt, marked=True)
    if state is EngineState.UP:
        return Cell("up", Tone.GOOD, marked=True)
    return Cell(state.value, Tone.WARNING, marked=True)


def load_cells(load: WorkerState | None) -> list[Cell]:
    """Running and waiting requests, and cache usage."""
    if load is None:
        return [QUIET_DASH] * 3
    forward = load.forward_pass
    usage = forward.cache_usage
    waiting = number_cell(forward.requests_waiting, Tone.WARNING if forward.requests_waiting else Tone.PLAIN)
    return [number_cell(load.running_decodes), waiting, Cell(f"{usage:.0%}", share=usage)]


def ago_cell(at_us: int | None, now_us: int, late_us: int | None = None) -> Cell:
    """The time since a moment; a dash if that moment never came."""
    if not at_us:
        return QUIET_DASH
    age_us = max(0, now_us - at_us)
    late = late_us is not None and age_us > late_us
    hint = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_us / 1e6))
    return Cell(f"{age_text(age_us)} ago", Tone.WARNING if late else Tone.PLAIN, hint)


def _row(worker_id: str, record: FleetRecord, held: Sequence[int] | None, now_us: int) -> list[Cell]:
    endpoint, repair = record.endpoint, record.repair
    counts = Digest(list(held[:WORDS])) if held is not None else None
    kind = f"{endpoint.kind.value}, {endpoint.role.value}" if endpoint.role.value != "both" else endpoint.kind.value
    return [
        Cell(worker_id, hint=endpoint.url),
        state_cell(record.state, record.liveness, record.doubt),
        Cell(endpoint.model_id, hint=f"{kind}; tokenizer {endpoint.tokenizer_id}"),
        QUIET_DASH if counts is None else blocks_cell({tier: counts.count(tier) for tier in Tier}),
        *load_cells(record.load),
        ago_cell(record.applied_us, now_us),
        QUIET_DASH if repair is None else Cell(f"{ago_cell(repair.at_us, now_us).text}: {repair.reason}", Tone.PLAIN),
        ago_cell(record.heard_us, now_us, LATE_US),
        Cell(str(record.incarnation), Tone.QUIET),
    ]


def _is_well(record: FleetRecord) -> bool:
    """True if the worker needs no attention."""
    return record.liveness is Liveness.ALIVE and record.state is EngineState.UP and not record.doubt
