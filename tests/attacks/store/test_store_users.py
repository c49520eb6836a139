"""Rogue routers and auditors: what the holder of such a user's password tries at the store, and the outcome."""

from contextlib import suppress
from functools import partial
from itertools import product

import anyio.to_thread
import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from kvatlas.fleet_store.fleet_store import POOLS, object_keys
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys
from tests.attacks.attacked_fleet import AttackedServers, attacked_fleet, attacked_servers
from tests.kvatlas.store.test_hostile_arguments import FUNCTIONS

pytestmark = pytest.mark.anyio

BLOCKS = "kva:{s0}:blocks:00"
POOL = pool_keys("p")
Words = tuple[str | int | bytes, ...]


def fcall(function: str, keys: tuple[str, ...], *args: str | int | bytes, call: str = "FCALL") -> Words:
    return (call, function, len(keys), *keys, *args)


index_ro = partial(fcall, call="FCALL_RO")
RETIRE, FORGET, APPLY = map(INDEX_LIBRARY.function, ("kvatlas_retire", "kvatlas_forget", "kvatlas_apply"))
OVERLAP, ACTIVE = map(INDEX_LIBRARY.function, ("kvatlas_overlap", "kvatlas_active"))
SCRUB = INDEX_LIBRARY.function("kvatlas_scrub")
LOOK = POOL_LIBRARY.function("kvatlas_pool_look")

STALLS: list[Words] = [
    ("ZRANDMEMBER", POOL[8], -20_000_000),
    ("HRANDFIELD", BLOCKS, -20_000_000, "WITHVALUES"),
    ("SRANDMEMBER", "kva:{s0}:retired", -20_000_000),
    ("SORT", "kva:{s0}:retired", "BY", "kva:*"),
    ("SORT_RO", "kva:{s0}:free", "BY", "kva:*"),
    ("LRANGE", "kva:{s0}:free", 0, -1),
    ("ZRANGE", "kva:{fleet}:scope-uses", 0, -1),
    ("HKEYS", BLOCKS),
    ("HVALS", BLOCKS),
    ("SUNION", "kva:{s0}:retired", "kva:{s0}:pinned"),
    ("LCS", "kva:{s0}:a", "kva:{s0}:b"),
    ("BITCOUNT", "kva:{s0}:a"),
    ("DUMP", BLOCKS),
    ("EVAL", "while true do end", 0),
    ("EVAL_RO", "while true do end", 0),
    ("CLIENT", "PAUSE", 60_000),
    ("KEYS", "*"),
    ("SCAN", 0, "COUNT", 20_000_000),
    ("MEMORY", "DOCTOR"),
    ("OBJECT", "FREQ", BLOCKS),
    ("WAIT", 9, 60_000),
]
READS: list[Words] = [
    ("GET", "others"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("MONITOR",),
    ("SUBSCRIBE", "__keyspace@0__:*"),
    ("PSUBSCRIBE", "*"),
    ("CLIENT", "LIST"),
    ("CLIENT", "TRACKING", "ON", "BCAST"),
    ("SLOWLOG", "GET", 100),
    ("ACL", "LIST"),
    ("ACL", "WHOAMI"),
    ("PSYNC", "?", -1),
    ("MIGRATE", "10.0.0.1", 6379, BLOCKS, 0, 10),
]
EJECTS: list[Words] = [
    fcall(RETIRE, ("kva:{s0}:workers",), "victim", b"\0" * 8),
    fcall(FORGET, ("kva:{s0}:workers", "kva:{s0}:steps"), "victim", b"\0" * 8),
    fcall(APPLY, ("kva:{s0}:workers",) * 11, b""),
    ("HDEL", POOL[0], "victim"),
    ("HSET", POOL[0], "victim", b"another address"),
    ("UNLINK", POOL[0]),
    ("DEL", "kva:{s0}:active"),
    ("HDEL", "kva:{s0}:active", b"\0\0\1"),
    ("RENAME", "kva:{s0}:active", "kva:{s0}:inactive"),
    ("EXPIRE", "kva:{s0}:workers", 0),
    ("RESTORE", "kva:{s0}:workers", 0, b"", "REPLACE"),
    ("HSET", "kva:{fleet}:leases", 0, "9999999999999 rogue"),
    ("HSET", "kva:{fleet}:layout", "answers", 9),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("FUNCTION", "FLUSH"),
    ("FUNCTION", "KILL"),
    ("SCRIPT", "KILL"),
    ("REPLICAOF", "10.0.0.1", 6379),
    ("FAILOVER",),
    ("CLUSTER", "RESET"),
    ("SHUTDOWN", "NOSAVE"),
    ("FLUSHALL",),
    ("SWAPDB", 0, 1),
]
FILLS: list[Words] = [
    ("SETRANGE", "kva:{s0}:a", 500_000_000, "x"),
    ("SETBIT", "kva:{s0}:a", 4_000_000_000, 1),
    ("SET", "others", "x"),
    ("APPEND", "kva:{s0}:a", "x"),
    ("XADD", "kva:{s0}:a", "*", "x", "x"),
    ("RPUSH", "kva:{s0}:free", "x"),
    ("PFADD", "kva:{s0}:a", "x"),
    ("COPY", BLOCKS, "kva:{s0}:copy"),
    ("SUNIONSTORE", "kva:{s0}:copy", "kva:{s0}:retired"),
    ("SCRIPT", "LOAD", "return 1"),
    ("FUNCTION", "LOAD", "#!lua name=rogue\n"),
    ("CONFIG", "SET", "maxmemory", 1),
    ("CONFIG", "SET", "client-output-buffer-limit", "normal 0 0 0"),
    ("BGSAVE",),
    ("SAVE",),
]
OF_ROUTERS_ALONE: list[Words] = [
    ("CONFIG", "GET", "requirepass"),
    ("HGETALL", BLOCKS),
    ("HSCAN", BLOCKS, 0, "COUNT", 20_000_000),
    ("HGETALL", "kva:{s0}:touched"),
    ("SMEMBERS", "kva:{s0}:pinned"),
    ("SET", POOL[1], b"x" * 64),
    index_ro(SCRUB, (BLOCKS, *["kva:{s0}:workers"] * 6), "", 0, 100, "victim"),
]
"""What auditors may do and routers may not."""
OF_AUDITORS_ALONE: list[Words] = [
    ("HSET", POOL[1], "victim", b""),
    ("ZREM", POOL[8], "x"),
    fcall(POOL_LIBRARY.function("kvatlas_pool_leave"), POOL, "router"),
    fcall(POOL_LIBRARY.function("kvatlas_pool_ejections"), ("kva:{pool:p}:ejections",), "r", 1, 1, 1, b"\x90"),
]
"""What routers may do and auditors may not."""
BOUNDED: list[Words] = [
    index_ro(OVERLAP, (BLOCKS, "kva:{s0}:meta", "kva:{s0}:marked", "kva:{s0}:marks:00"), b"\0" * 8_000, "1e-9", "", 0),
    index_ro(OVERLAP, (BLOCKS, "kva:{s0}:meta", "kva:{s0}:marked", "kva:{s0}:marks:00"), b"\0" * 8_000, -1, "", 0),
    index_ro(ACTIVE, ("kva:{s0}:active", "kva:{s0}:meta"), 0, 20_000_000),
    index_ro(SCRUB, (BLOCKS, *["kva:{s0}:workers"] * 6), "", 0, "nan", "victim"),
    index_ro(LOOK, POOL, b"\x91" * 300_000),
]
"""Functions that every user may call, with arguments that would take forever: refused with or without users."""


HOSTILE = [
    [],
    [b"nan"] * 8,
    [b"1e308"] * 8,
    [b"-20000000"] * 8,
    [b"9007199254740993"] * 3,
    [b"victim", b"\0" * 8, b"1"],
    [b"\xdd\xff\xff\xff\xff"] * 4,
    [b"x" * 100_000, b"1"],
    [b"1"] * 2_000,
]
"""Arguments that no caller sends."""


async def attempt(url: str, words: Words) -> str:
    """The store's answer to one command: the reason for a refusal, or `done`."""

    def send() -> str:
        with Redis.from_url(url, socket_timeout=20) as client:
            try:
                client.execute_command(*words)
            except NoPermissionError:
                return "no permission"
            except ResponseError as error:
                return f"no permission: {error}" if "ermission" in str(error) or "can't" in str(error) else str(error)
        return "done"

    return await anyio.to_thread.run_sync(send)


@pytest.mark.parametrize("user", ["router", "auditor"])
async def test_a_user_that_steps_out_of_its_role_is_refused(with_users: AttackedServers, user: str) -> None:
    acts = [*STALLS, *READS, *EJECTS, *FILLS, *(OF_ROUTERS_ALONE if user == "router" else OF_AUDITORS_ALONE)]
    async with attacked_fleet(with_users) as fleet:
        url = with_users.store_url(user)
        answers = {words[:5]: await attempt(url, words) for words in acts}
        assert {words: text for words, text in answers.items() if not text.startswith("no permission")} == {}
        await fleet.check()


@pytest.mark.parametrize("user", ["router", "auditor"])
async def test_no_argument_of_a_function_stalls_the_store(servers: AttackedServers, user: str) -> None:
    async with attacked_fleet(servers) as fleet:
        for words in BOUNDED:
            text = await attempt(servers.store_url(user), words)
            assert text.startswith(("argument", "bad argument", "ERR", "user_function")) or "at most" in text, words[:5]
        await fleet.check()


async def test_a_router_changes_no_block_by_any_function_with_any_keys(with_users: AttackedServers) -> None:
    """Each function of the store is called with keys of its own kind and of others, and with hostile arguments."""
    async with attacked_fleet(with_users) as fleet:
        with Redis.from_url(with_users.store.url) as owner, Redis.from_url(with_users.store_url("router")) as router:
            (pool_id,) = owner.smembers(POOLS)
            parts = ("workers", "holders", "active", "meta", "retired", "free")
            shard = [f"kva:{{s0}}:{part}" for part in parts]
            records = [POOLS, *(f"kva:{{fleet}}:{part}" for part in ("members", "leases", "layout"))]
            kinds: list[list[str]] = [shard, [*records, *object_keys("acme")], list(pool_keys(pool_id.decode())), []]

            def count_done() -> int:
                done = 0
                for function, kind, args in product(FUNCTIONS, kinds, HOSTILE):
                    for keys in (kind, (kind * 3)[:17]):
                        with suppress(ResponseError):
                            router.execute_command("FCALL", function, len(keys), *keys, *args)
                            done += 1
                return done

            before = int(owner.info("memory")["used_memory"])
            assert await anyio.to_thread.run_sync(count_done) > 0, "some have keys and arguments that they take"
            assert int(owner.info("memory")["used_memory"]) < before + (32 << 20)
            assert owner.smembers(POOLS) == {pool_id} and owner.hlen("kva:{fleet}:leases") > 0
        await fleet.check()


async def test_without_users_only_the_network_protects_the_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    with attacked_servers(tmp_path_factory.mktemp("defaults"), users=False) as servers:
        for words in (("GET", "others"), ("SET", "others", "x"), ("CLIENT", "LIST"), ("KEYS", "*"), ("FLUSHALL",)):
            assert await attempt(servers.store.url, words) == "done"
