"""Replicas of the indexer: who lives, and is every partition somebody's?"""

from collections.abc import Collection, Iterator, Mapping

from kvatlas.errors import Unreachable
from kvatlas.fleet.store import LEASES, MEMBERS
from kvatlas.store.connection import UNREACHABLE, Store, reason
from kvatlas_cli.doctor.finding import Finding, Level, listed


async def read_indexers(store: Store, now_us: int) -> tuple[list[str], dict[int, str]]:
    """Who lives at this time of the store, sorted, and who holds which partition's lease. Raises Unreachable.

    Read as they are kept (`kvatlas.fleet.store`), without the functions: they may be gone, or of another version.
    """
    try:
        members, leases = await store.client.hgetall(MEMBERS), await store.client.hgetall(LEASES)
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
    """`members`: who lives; `leases`: the partitions that are held, by whom."""
    if not members:
        line = "no indexer lives: nothing that engines store or drop gets into the index"
        yield Finding("indexers.members", Level.ERROR, line, "start `kvatlas indexer`; two of them for a takeover")
    elif len(members) == 1:
        line = f"one indexer lives: {listed(members)}"
        yield Finding("indexers.members", Level.INFO, line, "a second one takes over within seconds")
    else:
        yield Finding("indexers.members", Level.OK, f"{len(members)} indexers live: {listed(members)}")
    free = [partition for partition in range(partitions) if partition not in leases]
    strange = set(leases.values()) - set(members)
    if free:
        line = f"{len(free)} of {partitions} partitions are nobody's: {listed(str(p) for p in free)}"
        advice = "they are taken within 5 s; if not, an indexer lives but does not reach NATS: see its /readyz and log"
        yield Finding("indexers.leases", Level.ERROR, line, advice)
    elif strange:
        line = f"leases are held by {listed(strange)}, which do not live"
        yield Finding("indexers.leases", Level.WARNING, line, "their leases end within 3 s; look again")
    else:
        yield Finding("indexers.leases", Level.OK, f"all {partitions} partitions are somebody's")
