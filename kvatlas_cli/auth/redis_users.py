"""Users of the store: indexer, router and auditor, with the commands and keys that each may use (Redis 7, Valkey).

A store checks the commands inside a function against the permissions of the calling user. So each user gets the commands
that its functions use, only on its keys; direct calls that bypass the functions are restricted in the same way. For the same
reason, no function is allowed by name: names change with every version, and would grant nothing beyond the commands.

Commands that read a whole key, or as much of it as the caller asks for, are allowed only on small keys.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import sha256

from kvatlas.ejection.store import ejections_key
from kvatlas.fleet_store.allowances import allowance_key
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, OBJECTS, POOLS
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.index.redis.keys import LAYOUT
from kvatlas.predictions.store import answers_key
from kvatlas.predictions.usage_counts import usage_keys
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys
from kvatlas.store.function_library import FunctionLibrary, mark_key

_CALL = re.compile(r"redis\.p?call\(\s*'([A-Z]+)'")

_CONNECT = ("auth", "hello", "ping", "select")
_CLUSTER = ("asking", "cluster|slots", "command", "readonly")
"""Commands that redis-py sends to the nodes of a cluster. `command` lists the server's commands."""
_ONE_FIELD = ("exists", "hexists", "hget", "hlen", "hmget")
"""Read commands whose duration depends only on the length of the command."""
_SERVER = ("config|get", "function|list", "info", "role")
"""Commands that only `doctor` and the indexers' checks need. `config|get` shows passwords in the server's configuration."""
_OF_TENANTS = ("zadd", "zcard", "zrangebyscore", "zrem")
"""Commands that maintain the list of tenants whose objects engines keep."""
_LIBRARIES = ("function|delete", "function|load")
_WHOLE_INDEX = ("hgetall", "hscan", "smembers", "smismember")
_INDEXER = ("discard", "exec", "multi", "sadd", "scard", "srandmember", "srem")
"""Commands that indexers send outside their functions."""

_ALL_KEYS = "kva:*"
_SMALL_FLEET_KEYS = (f"{LAYOUT}*", POOLS)
_ACTIVE_KEYS = "kva:{s*}:active"
"""A hash of worker names by holder, with as many entries as there are workers."""
_POOL = "*"
"""Placeholder for every pool."""
_READS = frozenset(
    {
        *("exists", "hexists", "hget", "hgetall", "hlen", "hmget", "hscan", "info", "lindex", "scard", "sismember"),
        *("smismember", "time", "type", "zcount", "zlexcount", "zrangebylex", "zrangebyscore", "zscore"),
    }
)
"""The commands of functions that write nothing."""


def redis_users(*, with_replicas: bool = False) -> dict[str, str]:
    """The rules of each user in ACL file syntax, without the password. `with_replicas`: routers may copy the index."""
    fleet_records = pool_keys(_POOL)[0]
    booked = [*pool_keys(_POOL)[1:], answers_key(_POOL), ejections_key(_POOL), *usage_keys(_POOL)]
    pool = fleet_records.partition("}")[0] + "}:*"
    everybody = [*_CONNECT, *_CLUSTER, "fcall_ro", "info", "time"]
    whole_index = _WHOLE_INDEX if with_replicas else ()
    return {
        "indexer": _rule(
            [f"~{_ALL_KEYS}"],
            everybody,
            ["fcall"],
            _ONE_FIELD,
            _WHOLE_INDEX,
            _INDEXER,
            _SERVER,
            _LIBRARIES,
            _commands(INDEX_LIBRARY, POOL_LIBRARY, FLEET_LIBRARY),
        ),
        # `info` shows whether a replica hears from its primary
        # a call needs write access to all of its keys; the commands inside the function are checked separately
        "router": " ".join(
            [
                _rule([f"%R~{_ALL_KEYS}"], everybody, _ONE_FIELD, whole_index),
                _selector([f"%R~{key}" for key in _SMALL_FLEET_KEYS], ["hgetall", "smembers"]),
                _selector([f"%R~{_ACTIVE_KEYS}"], ["hscan"]),
                _selector([f"%R~{pool}"], _commands(POOL_LIBRARY) & _READS),
                _selector([f"~{pool}"], ["fcall"]),
                _selector([f"~{key}" for key in booked], _commands(POOL_LIBRARY) - _READS - {"set"}),
                _selector([f"~{mark_key('*')}"], ["fcall", "set"]),
                _selector([f"~{allowance_key('*')}"], ["fcall", "hset", "pexpire"]),
                _selector([f"~{OBJECTS}:*"], ["expire", "fcall", "hset", "rename", *_OF_TENANTS]),
            ]
        ),
        "auditor": _rule([f"%R~{_ALL_KEYS}"], everybody, _ONE_FIELD, _WHOLE_INDEX, _SERVER)
        + " "
        + _selector([f"%R~{pool}"], _commands(POOL_LIBRARY) & _READS),
    }


def render_acl_file(passwords: Mapping[str, str], *, with_replicas: bool = False) -> str:
    """An ACL file with these users, their passwords as hashes, and no other users."""
    rules = redis_users(with_replicas=with_replicas)
    lines = ["user default off"]
    lines += [f"user {user} on #{sha256(passwords[user].encode()).hexdigest()} {rules[user]}" for user in rules]
    return "\n".join([*lines, ""])


def _commands(*libraries: FunctionLibrary) -> set[str]:
    """All commands that the functions call."""
    return {name.lower() for library in libraries for name in _CALL.findall(library.code)}


def _rule(keys: Iterable[str], *commands: Iterable[str]) -> str:
    """A rule that allows these commands on these keys, and nothing else."""
    allowed = sorted({name for group in commands for name in group})
    return " ".join([*keys, "-@all", *(f"+{name}" for name in allowed)])


def _selector(keys: Iterable[str], *commands: Iterable[str]) -> str:
    return f"({_rule(keys, *commands)})"
