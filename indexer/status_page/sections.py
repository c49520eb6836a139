"""Sections of a replica's page: the partitions with their owners and lag, and the fleet's workers."""

from collections.abc import Sequence

from redis.exceptions import RedisError

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.quantities import age_text, count_text, ranges_text
from kvatlas.status_page.content import (
    QUIET_DASH,
    Cell,
    Column,
    Fact,
    Section,
    Table,
    Tone,
    milliseconds_text,
    number_cell,
)
from kvatlas.status_page.server import Source, StatusPage
from kvatlas.status_page.workers import workers_section
from kvatlas_indexer.indexer_process import Replica
from kvatlas_indexer.partition.reader import PartitionStatus

MANY_PENDING = 1_000
OUT_OF_REACH = Cell("on its own page", Tone.QUIET, "another replica reads it")


def status_page(replica: Replica, index: ResidencyIndex, fleet: FleetStore) -> StatusPage:
    """`index`, `fleet`: the stores that the replica writes to."""

    async def partitions() -> Section:
        return partitions_section(replica, await fleet.leases())

    async def workers() -> Section:
        return await workers_section(await fleet.all(), index.digest)

    sources = [Source("partitions", "Partitions", partitions), Source("workers", "Workers", workers)]
    return StatusPage("indexer", lambda: replica.member_id, lambda: _facts(replica), sources, failures=(RedisError,))


def partitions_section(replica: Replica, leases: dict[int, str]) -> Section:
    """The partitions and their owners. `leases`: the holder of each partition's lease."""
    own = {status.partition: status for status in replica.partitions}
    every = range(replica.stream_partitions)
    free = [partition for partition in every if partition not in leases]
    lines = []
    if free:
        what = count_text(len(free), "partition has", "partitions have")
        lines.append(Cell(f"{what} no owner: {ranges_text(free)}. Their workers are not followed.", Tone.BAD))
    owners = sorted({*leases.values(), *replica.membership.members})
    return Section(
        "partitions",
        "Partitions",
        [
            Table(_OWNER_COLUMNS, [_owner_row(owner, leases, own, replica.member_id) for owner in owners], "no owner"),
            Table(
                _PARTITION_COLUMNS,
                [_partition_row(partition, leases.get(partition), own.get(partition)) for partition in every],
                title=f"All {len(every)} partitions",
                folded=True,
            ),
        ],
        lines,
    )


_PENDING = Column("pending", number=True, hint="messages in the stream that are not applied")
_LAG = Column("lag", number=True, hint="age of the newest applied message, while later ones are pending")
_NEWEST = Column("newest event", number=True, hint="since the newest applied message was made")
_OWNER_COLUMNS = (Column("owner"), Column("count", number=True), Column("partitions"), _PENDING, _LAG, _NEWEST)
_PARTITION_COLUMNS = (Column("partition", number=True), Column("owner"), _PENDING, _LAG, _NEWEST)


def _owner_row(owner: str, leases: dict[int, str], own: dict[int, PartitionStatus], here: str) -> Sequence[Cell]:
    partitions = [partition for partition, holder in leases.items() if holder == owner]
    first = [Cell(owner, hint="this replica" if owner == here else ""), number_cell(len(partitions))]
    first.append(Cell(ranges_text(partitions)) if partitions else QUIET_DASH)
    if owner != here:
        return [*first, OUT_OF_REACH, OUT_OF_REACH, OUT_OF_REACH]
    return [*first, *_progress_cells([own[partition] for partition in partitions if partition in own])]


def _partition_row(partition: int, owner: str | None, status: PartitionStatus | None) -> Sequence[Cell]:
    number = Cell(str(partition))
    if owner is None:
        return [number, Cell("none", Tone.BAD, marked=True), QUIET_DASH, QUIET_DASH, QUIET_DASH]
    if status is None:
        return [number, Cell(owner), OUT_OF_REACH, OUT_OF_REACH, OUT_OF_REACH]
    return [number, Cell(owner), *_progress_cells([status])]


def _progress_cells(partitions: Sequence[PartitionStatus]) -> list[Cell]:
    """The combined reading progress of these partitions."""
    ages = [one.lag_us for one in partitions if one.lag_us is not None]
    behind = [one for one in partitions if not one.at_end]
    lags = [one.lag_us for one in behind if one.lag_us is not None]
    lag = Cell("none", Tone.GOOD, "read to the end")
    if behind:
        lag = Cell(age_text(max(lags)) if lags else "not known yet", Tone.WARNING)
    newest = Cell(f"{age_text(max(0, min(ages)))} ago") if ages else QUIET_DASH
    return [_pending_cell(sum(one.pending for one in partitions)), lag, newest]


def _pending_cell(pending: int) -> Cell:
    return number_cell(pending, Tone.WARNING if pending >= MANY_PENDING else Tone.PLAIN)


def _facts(replica: Replica) -> Sequence[Fact]:
    partitions, counters, doubts = replica.partitions, replica.counters, replica.doubts
    pending = sum(one.pending for one in partitions)
    late_s = counters.event_lag.quantile(0.99)
    facts = [
        Fact("ready", Cell("yes", Tone.GOOD) if replica.ready else Cell("no: NATS or the store is down", Tone.BAD)),
        Fact("replicas", number_cell(len(replica.membership.members))),
        Fact("partitions here", Cell(f"{len(partitions)} of {replica.stream_partitions}")),
        Fact("messages pending", _pending_cell(pending)),
        Fact("event to index, p99", QUIET_DASH if late_s is None else Cell(milliseconds_text(late_s * 1e6))),
        Fact("workers in doubt", number_cell(len(doubts), Tone.WARNING if doubts else Tone.PLAIN)),
        Fact("messages applied", number_cell(counters.applied)),
    ]
    if replica.shards_out_of_memory:
        facts.append(Fact("shards without memory", number_cell(replica.shards_out_of_memory, Tone.BAD)))
    if replica.shards_evicting:
        facts.append(Fact("shards that evict keys", number_cell(replica.shards_evicting, Tone.BAD)))
    return facts
