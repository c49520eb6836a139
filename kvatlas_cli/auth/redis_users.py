"""Users of the store: indexer, router and auditor, with the commands and keys that each may use (Redis 7, Valkey).

A store checks the commands inside a function against the user who calls it. So each user gets the commands that its
functions use, and only on its keys: what a router calls by itself, past the functions, is refused alike.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import sha256

from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.outliers.store import outliers_key
from kvatlas.predictions.store import answers_key
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys
from kvatlas.store.function_library import FunctionLibrary, mark_key

_CALL = re.compile(r"redis\.p?call\('([A-Z]+)'")
_CLUSTER = ("cluster|slots", "cluster|shards", "cluster|nodes", "cluster|keyslot", "time", "multi", "exec", "discard")
_READ = "+@read +@connection -@dangerous -scan -randomkey -dbsize"
"""What only reads, without what goes over everybody's keys."""
_NO_WRITES = frozenset(
    {
        *("exists", "hexists", "hget", "hgetall", "hkeys", "hlen", "hmget", "hscan", "info", "lindex", "llen", "scard"),
        *(
            "sismember",
            "smismember",
            "smembers",
            "srandmember",
            "sscan",
            "time",
            "type",
            "zcard",
            "zcount",
            "zlexcount",
            "zrange",
            "zrangebylex",
            "zrangebyscore",
            "zscore",
        ),
    }
)
_SERVER = ("info", "config|get", "function|list", "role")
"""What only `doctor` and the indexers' checks need. `config|get` shows passwords that the server has in its configuration."""
_CALLS = ("fcall", "fcall_ro")
_LIBRARIES = ("function|load", "function|delete")
_ALL_KEYS = "kva:*"
_POOL = "*"
"""Stands for every pool."""


def redis_users() -> dict[str, str]:
    """The rules of each user as an ACL file has them, without the password."""
    fleet_key = pool_keys(_POOL)[0]  # has the fleet's records, which routers only read
    booked = [*pool_keys(_POOL)[1:], answers_key(_POOL), outliers_key(_POOL)]
    every_key = fleet_key.partition("}")[0] + "}:*"
    reads = f"%R~{_ALL_KEYS} -@all {_READ}"
    return {
        "indexer": f"~{_ALL_KEYS} -@all {_READ} "
        + _allow(
            _CLUSTER,
            _SERVER,
            _writes(INDEX_LIBRARY, POOL_LIBRARY, FLEET_LIBRARY),
            _CALLS,
            ["function|load", "function|delete"],
        ),
        # `info` says whether a replica hears from its primary
        # a call needs the right to write all keys that it is given; what is called inside is checked by itself
        "router": f"{reads} {_allow(_CLUSTER, ['fcall_ro', 'info'])} "
        f"(~{every_key} -@all +fcall) ({' '.join(f'~{key}' for key in booked)} -@all {_allow(_writes(POOL_LIBRARY))}) "
        f"(~{mark_key('*')} -@all +fcall +set)",
        "auditor": f"{reads} {_allow(_CLUSTER, _SERVER, ['fcall_ro'])}",
    }


def render_acl_file(passwords: Mapping[str, str]) -> str:
    """An ACL file with these users, their passwords as hashes, and no other user."""
    rules = redis_users()
    lines = ["user default off"]
    lines += [f"user {user} on #{sha256(passwords[user].encode()).hexdigest()} {rules[user]}" for user in rules]
    return "\n".join([*lines, ""])


@cache
def _writes(*libraries: FunctionLibrary) -> list[str]:
    """Commands of the functions that write."""
    called = {name.lower() for library in libraries for name in _CALL.findall(library.code)}
    return sorted(called - _NO_WRITES)


def _allow(*commands: Iterable[str]) -> str:
    return " ".join(f"+{name}" for group in commands for name in group)
