"""The store: is it one that the index can be kept in, and has room?"""

from collections.abc import Iterator, Mapping, Sequence

from kvatlas.errors import LayoutMismatch
from kvatlas.fleet.store import FLEET_LIBRARY
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.index.redis.layout import read_layout
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.store.connection import Store
from kvatlas.version import own_version
from kvatlas_cli.doctor.finding import Finding, Level, listed, many
from kvatlas_cli.doctor.store_facts import LISTPACK, POLICY, ServerFacts

LEAST_VERSION = 7
MOST_LISTPACK = 128
FULL, FILLING = 0.9, 0.75
"""At nine tenths the index begins to leave workers out (`kvatlas.index`, room)."""


def judge_servers(servers: Sequence[ServerFacts], libraries: Mapping[str, str]) -> Iterator[Finding]:
    """What each server says of itself; `libraries`: our own code of the functions, by name."""
    for server in servers:
        yield _version(server)
        yield from _role(server)
        yield _policy(server)
        yield _listpack(server)
        yield _functions(server, libraries)
        yield _memory(server)
        yield _persistence(server)


async def layout(store: Store) -> tuple[Finding, tuple[int, int] | None]:
    """And (partitions, shards), where there is one that we know."""
    try:
        found = await read_layout(store)
    except LayoutMismatch as error:
        line, advice = str(error), "run one version of kvatlas on one store; empty it to lay it out anew"
        return Finding("store.layout", Level.ERROR, line, advice), None
    if found is None:
        line = "no indexer has laid out this store yet"
        return Finding("store.layout", Level.ERROR, line, "start `kvatlas indexer` on it"), None
    return Finding("store.layout", Level.OK, f"{many(found[0], 'partition')} in {many(found[1], 'shard')}"), found


def own_libraries() -> dict[str, str]:
    """The code of this version's functions, by library."""
    return {library.name: library.code for library in (INDEX_LIBRARY, FLEET_LIBRARY, POOL_LIBRARY)}


def _version(server: ServerFacts) -> Finding:
    valkey = server.info.get("valkey_version")
    told = str(valkey or server.info.get("redis_version", ""))
    line = f"{server.name} is {'Valkey' if valkey else 'Redis'} {told}"
    major = told.partition(".")[0]
    if major.isdigit() and int(major) < LEAST_VERSION:
        return Finding("store.version", Level.ERROR, line, f"functions need {LEAST_VERSION} or later")
    return Finding("store.version", Level.OK, line)


def _role(server: ServerFacts) -> Iterator[Finding]:
    if not server.primary:
        line = f"{server.name} is a replica: indexers and routers can't write there"
        yield Finding("store.role", Level.ERROR, line, "give the primary's address")


def _policy(server: ServerFacts) -> Finding:
    policy = (server.config or {}).get(POLICY) or server.info.get("maxmemory_policy")
    if policy is None:
        return Finding(
            "store.policy", Level.WARNING, f"{server.name} does not tell its {POLICY}", "see that it is noeviction"
        )
    if policy != "noeviction":
        line = f"{server.name} has {POLICY} {policy}: an evicted key is a wrong answer"
        return Finding("store.policy", Level.ERROR, line, f"CONFIG SET {POLICY} noeviction")
    return Finding("store.policy", Level.OK, f"{server.name} evicts nothing")


def _listpack(server: ServerFacts) -> Finding:
    told = (server.config or {}).get(LISTPACK)
    if told is None:
        line = f"{server.name} does not tell its {LISTPACK}"
        return Finding("store.listpack", Level.INFO, line, f"see that it is {MOST_LISTPACK} or less")
    if int(told) > MOST_LISTPACK:
        line = f"{server.name} has {LISTPACK} {told}: scopes with fewer blocks than that are slow to look up"
        return Finding("store.listpack", Level.WARNING, line, f"CONFIG SET {LISTPACK} {MOST_LISTPACK}")
    return Finding("store.listpack", Level.OK, f"{server.name} has {LISTPACK} {told}")


def _functions(server: ServerFacts, libraries: Mapping[str, str]) -> Finding:
    check, there = "store.functions", server.libraries
    if there is None:
        return Finding(
            check, Level.INFO, f"{server.name} does not list its functions", "let this user call FUNCTION LIST"
        )
    if INDEX_LIBRARY.name not in there:
        line = f"{server.name} has no function library {INDEX_LIBRARY.name}: nothing can be looked up"
        return Finding(check, Level.ERROR, line, "a running indexer loads it within seconds; is one running?")
    other = [name for name in there if name in libraries and there[name] != libraries[name]]
    if other:
        line = f"{server.name} has {listed(other)} of another version than this kvatlas {own_version()}"
        return Finding(check, Level.WARNING, line, "run one version of kvatlas; indexers that start load theirs")
    return Finding(check, Level.OK, f"{server.name} has {listed(there)} of kvatlas {own_version()}")


def _memory(server: ServerFacts) -> Finding:
    used, limit = int(server.info.get("used_memory", 0)), int(server.info.get("maxmemory", 0))
    if not limit:
        line = f"{server.name} uses {_mib(used)} without a limit"
        return Finding(
            "store.memory", Level.INFO, line, "set maxmemory, so that the machine is not what runs out of it"
        )
    share = used / limit
    line = f"{server.name} uses {_mib(used)} of {_mib(limit)} ({share:.0%})"
    if share >= FULL:
        advice = "raise maxmemory: workers are left out of the index until a tenth of it is free"
        return Finding("store.memory", Level.ERROR, line, advice)
    if share >= FILLING:
        return Finding("store.memory", Level.WARNING, line, "raise maxmemory, or use --granularity 4 in the publishers")
    return Finding("store.memory", Level.OK, line)


def _persistence(server: ServerFacts) -> Finding:
    info, check = server.info, "store.persistence"
    if info.get("aof_enabled") and info.get("aof_last_write_status", "ok") != "ok":
        line = f"{server.name} could not write its append-only file: it refuses writes"
        return Finding(check, Level.ERROR, line, "see its log; is its disk full?")
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        line = f"{server.name} could not save its data the last time"
        return Finding(
            check, Level.ERROR, line, "see its log; it refuses writes where stop-writes-on-bgsave-error is on"
        )
    kept = "an append-only file" if info.get("aof_enabled") else "snapshots at most"
    return Finding(check, Level.OK, f"{server.name} keeps {kept}; what it forgets, publishers tell again")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
