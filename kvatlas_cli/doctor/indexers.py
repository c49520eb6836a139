"""Indexer replicas: which are alive, and whether every partition has an owner."""

from collections.abc import Collection, Iterator, Mapping

from kvatlas.errors import Unreachable
from kvatlas.fleet_store.fleet_store import leases_key, members_key
from kvatlas.quantities import ranges_text
from kvatlas.store.connection import UNREACHABLE, Store, reason
from kvatlas_cli.doctor.finding import Finding, Level, join_names


async def read_indexers(store: Store, now_us: int, layout: int = 0) -> tuple[list[str], dict[int, str]]:
    """A layout's members that are alive at this time on the store's clock, sorted, and the holder of each partition's
    lease. Raises Unreachable.

    Read directly (keys: `kvatlas.fleet_store.fleet_store`), because the functions may be missing or may be of another
    version.
    """
    try:
        members = await store.client.hgetall(members_key(layout))
        leases = await store.client.hgetall(leases_key(layout))
    except UNREACHABLE as error:
        raise Unreachable(f"{store.name}: {reason(error)}") from error
    live = sorted(member.decode() for member, ends_ms in members.items() if int(ends_ms) * 1_000 > now_us)
    held: dict[int, str] = {}
    for partition, value in leases.items():
        ends_ms, _, member = value.partition(b" ")
        if int(ends_ms) * 1_000 > now_us:
            held[int(partition)] = member.decode()
    return live, held


def judge_indexers(members: Collection[str], leases: Mapping[int, str], partitions: int) -> Iterator[Finding]:
    """`members`: live indexers. `leases`: the holder of each partition that has one."""
    if not members:
        line = "no indexer is running: the index does not follow the engines"
        yield Finding("indexers.members", Level.ERROR, line, "start `kvatlas indexer`; with two, one can take over")
    elif len(members) == 1:
        line = f"one indexer is running: {join_names(members)}"
        yield Finding("indexers.members", Level.INFO, line, "a second one would take over within seconds")
    else:
        yield Finding("indexers.members", Level.OK, f"{len(members)} indexers are running: {join_names(members)}")
    free = [partition for partition in range(partitions) if partition not in leases]
    unknown = set(leases.values()) - set(members)
    if free:
        line = f"{len(free)} of {partitions} partitions have no owner: {ranges_text(free)}"
        advice = "a running indexer takes them within 5 s; if it does not, it can't reach NATS: see its /readyz and log"
        yield Finding("indexers.leases", Level.ERROR, line, advice)
    elif unknown:
        line = f"leases are held by indexers that are not running: {join_names(unknown)}"
        yield Finding("indexers.leases", Level.WARNING, line, "these leases expire within 3 s; check again")
    else:
        yield Finding("indexers.leases", Level.OK, f"all {partitions} partitions have an owner")
