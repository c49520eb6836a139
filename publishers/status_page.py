"""A sidecar's human-readable page: each worker's engine, feed, blocks by tier, outbox, last snapshot, and problems."""

import time
from collections.abc import Sequence

from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.fleet.records import EngineState
from kvatlas.quantities import age_text
from kvatlas.status_page.content import QUIET_DASH, Cell, Column, Fact, Section, Table, Tone, number_cell
from kvatlas.status_page.server import Source, StatusPage
from kvatlas.status_page.workers import ago_cell, blocks_cell, load_cells, state_cell
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.stream.changelog import Changelog

MOST_NAMED = 3
"""Maximum number of workers named in the page's title."""

_COLUMNS = (
    Column("worker"),
    Column("state"),
    Column("model"),
    Column("blocks", hint="that are published, by tier"),
    Column("running", number=True, hint="requests that the engine runs"),
    Column("waiting", number=True, hint="requests that wait at the engine"),
    Column("cache", hint="use of the engine's KV cache"),
    Column("last event", number=True, hint="since the engine's last batch"),
    Column("unacknowledged", number=True, hint="messages that NATS has not acknowledged yet"),
    Column("last snapshot", hint="when its incarnation began, and why"),
    Column("partition", number=True),
    Column("incarnation", number=True),
)


def status_page(published: Sequence[Publisher], workers: int) -> StatusPage:
    """`published` grows until all of the process's `workers` are published."""

    async def sections() -> Section:
        return _workers_section(published)

    def facts() -> Sequence[Fact]:
        up = sum(publisher.engine.state is EngineState.UP for publisher in published)
        waiting = sum(publisher.changelog.outbox.waiting for publisher in published)
        every = Tone.GOOD if len(published) == workers else Tone.BAD
        return [
            Fact("published workers", Cell(f"{len(published)} of {workers}", every)),
            Fact("engines up", Cell(f"{up} of {workers}", Tone.GOOD if up == workers else Tone.WARNING)),
            Fact("blocks", number_cell(sum(publisher.ledger.digest.blocks for publisher in published))),
            Fact("messages unacknowledged", number_cell(waiting)),
        ]

    def name() -> str:
        more = ", …" if len(published) > MOST_NAMED else ""
        return ", ".join(publisher.worker_id for publisher in published[:MOST_NAMED]) + more

    return StatusPage("sidecar", name, facts, [Source("workers", "Workers", sections)])


def _workers_section(published: Sequence[Publisher]) -> Section:
    now_us = time.time_ns() // 1_000
    lines = []
    for publisher in published:
        for diagnosis in publisher.diagnoses.current:
            lines.append(Cell(f"{publisher.worker_id}: {diagnosis.seen}. {diagnosis.cure}.", Tone.WARNING))
        if trouble := publisher.status()["trouble"]:
            lines.append(Cell(f"{publisher.worker_id}: publishing blocked: {trouble}", Tone.BAD))
    rows = [_row(publisher, now_us) for publisher in published]
    return Section("workers", "Workers", [Table(_COLUMNS, rows, "no worker is published yet")], lines)


def _row(publisher: Publisher, now_us: int) -> list[Cell]:
    changelog, gauges, settings = publisher.changelog, publisher.gauges(), publisher.settings
    silent_s = gauges.silence_s
    return [
        Cell(publisher.worker_id, hint=settings.engine_url or ""),
        _state_cell(publisher, gauges.feed_connected),
        Cell(settings.model_id),
        blocks_cell(dict(zip(Tier, gauges.tiers, strict=True))),
        *load_cells(publisher.engine.load),
        QUIET_DASH if silent_s is None else Cell(f"{age_text(int(silent_s * 1e6))} ago"),
        number_cell(changelog.outbox.waiting),
        _snapshot_cell(changelog, now_us),
        Cell(str(partition_of(publisher.worker_id, settings.partitions))),
        Cell(str(changelog.outbox.incarnation), Tone.QUIET),
    ]


def _state_cell(publisher: Publisher, feed_connected: int | None) -> Cell:
    if publisher.changelog.yielded:
        return Cell("yields", Tone.WARNING, "another publisher publishes this worker", marked=True)
    state = state_cell(publisher.engine.state)
    if feed_connected == 0 and publisher.engine.state is EngineState.UP:
        return Cell("no feed", Tone.BAD, "the engine answers, but its event socket is not connected", marked=True)
    return state


def _snapshot_cell(changelog: Changelog, now_us: int) -> Cell:
    """The last snapshot, or the one that is due (`changelog.incarnation_due`)."""
    if (due := changelog.incarnation_due) is not None:
        return Cell(f"due now: {due.value}", Tone.WARNING)
    if changelog.begun_because is None:
        return QUIET_DASH
    return Cell(f"{ago_cell(changelog.begun_us, now_us).text}: {changelog.begun_because.value}")
