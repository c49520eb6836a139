"""Checks that the store suits the index and has free memory."""

from collections.abc import Collection, Iterator, Sequence

from kvatlas.errors import LayoutMismatch
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.index.redis.layout import Layout, read_layout
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.store.connection import Store
from kvatlas.version import own_version
from kvatlas_cli.doctor.finding import Finding, Level, join_names
from kvatlas_cli.doctor.store_facts import LISTPACK, POLICY, ServerFacts
from kvatlas_cli.output import count_text

MIN_VERSION = 7
MAX_LISTPACK = 128
FAR_MS = 5.0
FULL, FILLING = 0.9, 0.75
"""Shares of memory in use. From FULL on, the index leaves workers out (`kvatlas.index`)."""


_MANAGED_POLICY = (
    f"CONFIG is refused here, as managed services do: set {POLICY} to noeviction in the service's own settings "
    "(ElastiCache, MemoryDB: parameter group; Memorystore: configuration; Azure: advanced settings)"
)


def judge_distance(round_trip_ms: float) -> Finding:
    """The finding about the distance to the store, and what it costs."""
    line = f"a round trip to the store takes {round_trip_ms:.1f} ms from here at best"
    if round_trip_ms < FAR_MS:
        return Finding("store.distance", Level.OK, line)
    line += ": each choice of a router that is as far away waits for one round trip, or is made by load"
    advice = "run the store beside the routers, or let them keep their own copy of the index (--replica), which avoids the wait"
    return Finding("store.distance", Level.WARNING, line, advice)


def judge_servers(servers: Sequence[ServerFacts], libraries: Collection[str]) -> Iterator[Finding]:
    """Judge each server. `libraries`: names of this version's function libraries."""
    for server in servers:
        yield _judge_version(server)
        yield from _judge_role(server)
        yield _judge_policy(server)
        yield _judge_listpack(server)
        yield _judge_functions(server, libraries)
        yield _judge_memory(server)
        yield from _judge_connections(server)
        yield _judge_persistence(server)


async def examine_layout(store: Store) -> tuple[Finding, Layout | None]:
    """Examine the layout. Returns the finding, and the layout if it is of this version."""
    try:
        found = await read_layout(store)
    except LayoutMismatch as error:
        line, advice = (
            str(error),
            "use the same version of kvatlas everywhere, or empty the store",
        )
        return Finding("store.layout", Level.ERROR, line, advice), None
    if found is None:
        line = "no indexer has created a layout in this store yet"
        return Finding("store.layout", Level.ERROR, line, "start `kvatlas indexer` on it"), None
    line = f"{count_text(found.partitions, 'partition')} in {count_text(found.shards, 'shard')}"
    return Finding("store.layout", Level.OK, line + (", with a side index" if found.side_index else "")), found


def own_libraries() -> list[str]:
    """The names of this version's function libraries."""
    return [library.name for library in (INDEX_LIBRARY, FLEET_LIBRARY, POOL_LIBRARY)]


def _judge_version(server: ServerFacts) -> Finding:
    valkey = server.info.get("valkey_version")
    version = str(valkey or server.info.get("redis_version", ""))
    line = f"{server.name} is {'Valkey' if valkey else 'Redis'} {version}"
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < MIN_VERSION:
        return Finding("store.version", Level.ERROR, line, f"functions need version {MIN_VERSION} or later")
    return Finding("store.version", Level.OK, line)


def _judge_role(server: ServerFacts) -> Iterator[Finding]:
    if not server.primary:
        line = f"{server.name} is a replica: indexers and routers can't write there"
        yield Finding("store.role", Level.ERROR, line, "give the primary's address")


def _judge_policy(server: ServerFacts) -> Finding:
    policy = (server.config or {}).get(POLICY) or server.info.get("maxmemory_policy")
    if policy is None:
        return Finding(
            "store.policy",
            Level.WARNING,
            f"{server.name} does not show its {POLICY}",
            f"make sure that it is noeviction: {_MANAGED_POLICY}",
        )
    if policy != "noeviction":
        line = f"{server.name} has {POLICY} {policy}: evicted keys make the index wrong"
        advice = f"CONFIG SET {POLICY} noeviction" if server.config is not None else _MANAGED_POLICY
        return Finding("store.policy", Level.ERROR, line, advice)
    return Finding("store.policy", Level.OK, f"{server.name} evicts nothing")


def _judge_listpack(server: ServerFacts) -> Finding:
    entries = (server.config or {}).get(LISTPACK)
    if entries is None:
        line = f"{server.name} does not show its {LISTPACK}"
        advice = (
            f"managed services: set {LISTPACK} to {MAX_LISTPACK} or less in the parameter group, if it is higher there"
        )
        return Finding("store.listpack", Level.INFO, line, advice)
    if int(entries) > MAX_LISTPACK:
        line = f"{server.name} has {LISTPACK} {entries}: lookups in scopes with fewer blocks are slow"
        return Finding("store.listpack", Level.WARNING, line, f"CONFIG SET {LISTPACK} {MAX_LISTPACK}")
    return Finding("store.listpack", Level.OK, f"{server.name} has {LISTPACK} {entries}")


def _judge_functions(server: ServerFacts, libraries: Collection[str]) -> Finding:
    check, loaded = "store.functions", server.libraries
    if loaded is None:
        return Finding(
            check, Level.INFO, f"{server.name} does not list its functions", "allow FUNCTION LIST for this user"
        )
    if INDEX_LIBRARY.name not in loaded:
        line = f"{server.name} has no function library {INDEX_LIBRARY.name}: lookups fail"
        return Finding(check, Level.ERROR, line, "an indexer of this version loads it when it starts; is one running?")
    own = [name for name in loaded if name in libraries]
    line = f"{server.name} has {join_names(own)} of kvatlas {own_version()}"
    if other := [name for name in loaded if name not in libraries]:
        line += f", and {join_names(other)} of other versions"
    return Finding(check, Level.OK, line)


def _judge_memory(server: ServerFacts) -> Finding:
    used, limit = int(server.info.get("used_memory", 0)), int(server.info.get("maxmemory", 0))
    if not limit:
        line = f"{server.name} uses {_mib(used)} and has no memory limit"
        return Finding(
            "store.memory",
            Level.INFO,
            line,
            "set maxmemory, so that the machine does not run out of memory",
        )
    share = used / limit
    line = f"{server.name} uses {_mib(used)} of {_mib(limit)} ({share:.0%})"
    if share >= FULL:
        advice = "raise maxmemory: workers are left out of the index until a tenth of the memory is free"
        return Finding("store.memory", Level.ERROR, line, advice)
    if share >= FILLING:
        return Finding(
            "store.memory", Level.WARNING, line, "raise maxmemory, or run the publishers with --granularity 4"
        )
    return Finding("store.memory", Level.OK, line)


def _judge_connections(server: ServerFacts) -> Iterator[Finding]:
    """Judge a server's connections; no finding for a server that does not show its limit."""
    used, limit = int(server.info.get("connected_clients", 0)), int(server.info.get("maxclients", 0))
    if not limit:
        return
    share, line = used / limit, f"{server.name} has {used:,} of at most {limit:,} connections ({used / limit:.0%})"
    if share < FILLING:
        yield Finding("store.connections", Level.OK, line)
        return
    level = Level.ERROR if share >= FULL else Level.WARNING
    advice = "CLIENT LIST shows whose they are, and CLIENT KILL USER ends a user's; if all are needed, raise maxclients"
    yield Finding("store.connections", level, line + ": no more can be opened when they are all taken", advice)


def _judge_persistence(server: ServerFacts) -> Finding:
    info, check = server.info, "store.persistence"
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        line = f"{server.name} can't write its append-only file and refuses writes"
        return Finding(check, Level.ERROR, line, "see its log; is the disk full?")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        line = f"the last save of {server.name} failed"
        return Finding(check, Level.ERROR, line, "see its log; with stop-writes-on-bgsave-error it refuses writes")
    kind = "an append-only file" if info.get("aof_enabled") else "at most snapshots"
    return Finding(check, Level.OK, f"{server.name} saves {kind}; publishers send again what it loses")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
