"""Tries every command that a server knows as each user of `kvatlas auth redis`: those that components of kvatlas send are
allowed, all others are not.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from kvatlas.fleet_store.allowances import allowance_key
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, POOLS, object_keys
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.index.redis.keys import SCOPES
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas_cli.auth.redis_users import redis_users
from tests.kvatlas_cli.auth.store_servers import GuardedStore

ROOT = Path(__file__).parents[3]

CONNECT = {"asking", "auth", "cluster|slots", "command", "hello", "info", "ping", "readonly", "select", "time"}
DOCTOR = {"config|get", "function|list", "role"}
TRANSACTIONS = {"discard", "exec", "multi"}
LIBRARIES = {"function|delete", "function|load"}
POINT_READS = {"exists", "hexists", "hget", "hlen", "hmget"}
CALL, CALL_RO = {"fcall"}, {"fcall_ro"}
WHOLE_READS = {"hgetall", "hscan", "smembers", "smismember"}
POOL_READS = POINT_READS | {"hgetall", "type", "zcount", "zlexcount", "zrangebylex", "zrangebyscore", "zscore"}
POOL_WRITES = {"hdel", "hincrby", "hset", "persist", "pexpire", "unlink", "zadd", "zrem"}
INDEX_COMMANDS = WHOLE_READS | POOL_READS | POOL_WRITES | CALL | CALL_RO
INDEX_COMMANDS |= {
    "expire",
    "hincrbyfloat",
    "hsetnx",
    "lindex",
    "lpop",
    "rename",
    "rpush",
    "sadd",
    "scard",
    "set",
    "srandmember",
    "srem",
    "zcard",
}

BLOCKS = "kva:{s0}:blocks:00"
KEYS = {
    "blocks": BLOCKS,
    "active": "kva:{s0}:active",
    "layout": "kva:{fleet}:layout",
    "pools": POOLS,
    "scopes": SCOPES,
    "fleet records": "kva:{pool:p}:workers",
    "bookings": "kva:{pool:p}:load.2",
    "mark": "kva:{fleet}:library:kvatlas_pool_00",
    "allowance": allowance_key("requests:acme"),
    "objects": object_keys("acme")[0],
    "of others": "others",
}
ROUTER = {
    "blocks": POINT_READS | CALL_RO,
    "active": POINT_READS | CALL_RO | {"hscan"},
    "layout": POINT_READS | CALL_RO | {"hgetall", "smembers"},
    "pools": POINT_READS | CALL_RO | {"hgetall", "smembers"},
    "scopes": POINT_READS | CALL_RO,
    "fleet records": POOL_READS | CALL_RO | CALL,
    "bookings": POOL_READS | POOL_WRITES | CALL_RO | CALL,
    "mark": POINT_READS | CALL_RO | CALL | {"set"},
    "allowance": POINT_READS | CALL_RO | CALL | {"hset", "pexpire"},
    "objects": POINT_READS | CALL_RO | CALL | {"hset", "expire", "rename", "zadd", "zcard", "zrangebyscore", "zrem"},
    "of others": set[str](),
}
INDEXER = dict.fromkeys(KEYS, INDEX_COMMANDS) | {"of others": set()}
AUDITOR = dict.fromkeys(KEYS, POINT_READS | WHOLE_READS | CALL_RO) | {
    "fleet records": POOL_READS | WHOLE_READS | CALL_RO,
    "bookings": POOL_READS | WHOLE_READS | CALL_RO,
    "of others": set(),
}
WITHOUT_KEYS = {
    "indexer": CONNECT | DOCTOR | TRANSACTIONS | LIBRARIES,
    "router": CONNECT,
    "auditor": CONNECT | DOCTOR,
}
ALWAYS = {"auth", "hello", "quit", "reset"}
"""A server may allow these before it checks a user."""


def commands_of(entries: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Each command and subcommand in an answer to COMMAND, with its minimum number of words."""
    for entry in entries:
        yield entry[0].decode().lower(), abs(entry[1])
        yield from commands_of(entry[9] if len(entry) > 9 else ())


def allowed(store: GuardedStore, user: str, key: str) -> set[str]:
    """The commands that this user may call on the key, according to the server. A group of commands, such as CONFIG, can't be
    called."""
    with Redis.from_url(store.server.url) as client:
        client.response_callbacks.clear()
        commands = dict(commands_of(client.execute_command("COMMAND")))
        calls = client.pipeline(transaction=False)
        for command, words in commands.items():
            name = command.split("|")
            rest = ["function", "1", key] if command in ("fcall", "fcall_ro") else [key] * (words - len(name))
            calls.execute_command("ACL", "DRYRUN", user, *name, *rest)
        answers = dict(zip(commands, calls.execute(raise_on_error=False), strict=True))
    errors = {command: answer for command, answer in answers.items() if isinstance(answer, Exception)}
    assert all("|" not in command and "not found" in str(error) for command, error in errors.items()), errors
    refusals = [answer for answer in answers.values() if isinstance(answer, bytes) and answer != b"OK"]
    assert refusals and all(b"permission" in answer for answer in refusals)
    return {command for command, answer in answers.items() if answer == b"OK"}


@pytest.mark.parametrize(("user", "table"), [("indexer", INDEXER), ("router", ROUTER), ("auditor", AUDITOR)])
def test_of_all_commands_a_user_may_call_what_it_needs(
    guarded_store: GuardedStore, user: str, table: dict[str, set[str]]
) -> None:
    for name, key in KEYS.items():
        may = allowed(guarded_store, user, key)
        may = {command for command in may - ALWAYS if not command.startswith("command|")}  # they answer like COMMAND
        assert may == (table[name] | WITHOUT_KEYS[user]) - ALWAYS, name


@pytest.mark.parametrize("user", ["indexer", "router", "auditor"])
def test_every_command_of_a_user_is_one_that_kvatlas_sends(user: str) -> None:
    in_functions = {
        name.lower()
        for library in (INDEX_LIBRARY, POOL_LIBRARY, FLEET_LIBRARY)
        for name in re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", library.code)
    }
    packages = ("kvatlas", "kvatlas_cli", "router_client", "indexer", "router")
    source = "\n".join(path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    for command in set(re.findall(r"\+([a-z_|]+)", redis_users()[user])) - in_functions:
        words = command.upper().replace("|", " ")
        sent = rf"(client|pipeline)\.{command}\(|\"{words}\"|transaction=True"
        by_driver = CONNECT | TRANSACTIONS - {"info", "ping", "time"}
        assert command in by_driver or re.search(sent, source), command


def test_only_routers_with_a_copy_may_read_the_whole_index() -> None:
    assert "+hscan" not in redis_users()["router"].partition("(")[0]
    assert "+hscan" in redis_users(with_replicas=True)["router"].partition("(")[0]


def test_no_rule_has_a_category() -> None:
    for rule in redis_users(with_replicas=True).values():
        assert "+@" not in rule and "~* " not in rule and "&" not in rule
