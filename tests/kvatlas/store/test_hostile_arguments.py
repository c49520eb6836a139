"""Whatever a caller passes to a function of the store, its work, its answer and its memory stay bounded."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.exceptions import ResponseError

from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY

LIBRARIES = (INDEX_LIBRARY, POOL_LIBRARY, FLEET_LIBRARY)
REGISTRATION = re.compile(r"^register[a-z_]*\('(\w+)'", re.MULTILINE)
FUNCTIONS = [
    library.function(name)
    for library in LIBRARIES
    for command in library.commands
    for name in REGISTRATION.findall(library.source(command))
]
KEYS = ["kva:{x}:hash", "kva:{x}:zset", "kva:{x}:set", "kva:{x}:list", "kva:{x}:string", "kva:{x}:absent"]
FIELDS = 20_000
MOST_COMMANDS = 4_000
"""The limit for one call."""
MOST_ANSWER_BYTES = 1 << 20
MOST_GROWTH_BYTES = 16 << 20

HASHES = b"".join(number.to_bytes(8, "big") for number in range(FIELDS))
numbers = st.sampled_from(
    [
        b"0",
        b"1",
        b"-1",
        b"64",
        b"1e-9",
        b"0.5",
        b"nan",
        b"inf",
        b"-inf",
        b"1e300",
        b"-20000000",
        b"9007199254740993",
        b"0x10",
    ]
)
rows = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=12),
    max_leaves=60,
)
bombs = st.sampled_from(
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four billion elements, none of which follows
        b"\x91" * 60_000,  # an array in an array in an array...
        msgpack.packb(list(range(60_000))),
        msgpack.packb([[]] * 60_000),
        msgpack.packb([1.0, [], [[0.0] * 13] * 9, [b"", 0, 0, 0, 0, 0] * 10_000, 0, 0, [], [], 0, 0]),
        msgpack.packb([1.0, [[128, HASHES]] * 9, [0.0] * 13, [b"w", 0, 0, 0, 0, 0], 0, 0, [], [], 0, 0]),
    ]
)
arguments = st.one_of(
    numbers,
    st.sampled_from([b"", HASHES[:8], HASHES, HASHES * 40, b"w" * 300_000, b"\0" * 3, b"\xff" * 11, b"finished"]),
    bombs,
    rows.map(msgpack.packb),
)
calls = st.one_of(
    st.lists(arguments, max_size=8),
    st.tuples(arguments, st.sampled_from([100, 1_000, 50_000])).map(lambda pair: [pair[0][:64]] * pair[1]),
)


@pytest.fixture(scope="module", params=["valkey", "redis8", "debian"])
def store(request: pytest.FixtureRequest) -> Iterator[Redis]:
    """A server with the functions, and copies of keys of every type with many members."""
    binary = Path("/usr/bin/redis-server") if request.param == "debian" else None
    if request.param == "redis8":
        binary = request.getfixturevalue("redis8_binary")
    if binary is not None and not binary.exists():
        pytest.skip("Debian's redis-server is not installed; apt-get install redis-server")
    with ValkeyProcess(binary=binary) as server, Redis.from_url(server.url) as client:
        for library in LIBRARIES:
            client.function_load(library.code, replace=True)
        members = [HASHES[at : at + 8] for at in range(0, len(HASHES), 8)]
        client.hset("whole:{x}:hash", mapping=dict.fromkeys(members, b"\0\0\1\1\0\0\2\1"))
        client.zadd("whole:{x}:zset", dict.fromkeys(members, 0))
        client.sadd("whole:{x}:set", *members)
        client.rpush("whole:{x}:list", *members)
        client.set("whole:{x}:string", HASHES)
        restore(client)
        yield client


def restore(store: Redis) -> None:
    """Restore the keys; the last one stays absent."""
    if changed := store.keys("kva:*"):
        store.delete(*changed)
    for key in KEYS[:-1]:
        store.copy(key.replace("kva", "whole"), key)


def changes_of(store: Redis) -> int:
    """Number of writes so far."""
    return int(store.info("persistence")["rdb_changes_since_last_save"])


def bytes_of(answer: object) -> int:
    if isinstance(answer, list):
        return sum(map(bytes_of, answer)) + len(answer)
    return len(answer) if isinstance(answer, bytes) else 8


@pytest.mark.parametrize("function", FUNCTIONS)
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(keys=st.lists(st.sampled_from(KEYS), min_size=17, max_size=17), args=calls)
@example(keys=[KEYS[0]] * 17, args=[HASHES, b"1e-9", b"", b"0"])
@example(keys=[KEYS[0]] * 17, args=[HASHES * 40, b"0", b"", b"0"])
@example(keys=[KEYS[0]] * 17, args=[HASHES, b"64", b"0", b"1e300", HASHES])
@example(keys=[KEYS[0]] * 17, args=[b"0", b"20000000"])
@example(keys=[KEYS[0]] * 17, args=[b"", b"0", b"nan", b"w"])
@example(keys=[KEYS[0]] * 17, args=[b"", b"0", b"1e300", b"w"])
@example(keys=[KEYS[0], KEYS[1]] + [KEYS[0]] * 15, args=[b"w", b"w" * 300_000] * 8)
def test_no_argument_makes_a_function_hold_or_fill_the_store(
    store: Redis, function: str, keys: list[str], args: list[bytes]
) -> None:
    before = int(store.info("memory")["used_memory"])
    changes = changes_of(store)
    store.config_resetstat()
    try:
        answer: object = store.execute_command(  # type: ignore[no-untyped-call]
            "FCALL", function, len(keys), *keys, *args
        )
    except ResponseError:
        answer = b""
    calls = sum(int(one["calls"]) for one in store.info("commandstats").values())
    after = int(store.info("memory")["used_memory"])
    if changes_of(store) != changes:
        restore(store)
    assert calls < MOST_COMMANDS
    assert bytes_of(answer) < MOST_ANSWER_BYTES
    assert after < before + MOST_GROWTH_BYTES
