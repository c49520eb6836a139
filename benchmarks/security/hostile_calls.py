"""The longest function calls that a hostile user of the store can make, with the largest arguments that functions accept, on a
store with a large fleet: CPU time of the server's main thread. `python -m benchmarks.security.hostile_calls`; `--binary
PROGRAM`: another server.

`tests/attacks/store/test_function_work.py` counts the work of the same calls, and needs no clock.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from redis import Redis
from redis.exceptions import ResponseError
from rich.console import Console

from benchmarks.result import Result, tabulate
from benchmarks.store_calls import LONGEST_MS
from kvatlas.ejection.store import ejections_key
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.fleet_store.allowances import allowance_key
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, object_keys
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.predictions.store import answers_key
from kvatlas.reservations.lookup import MOST_LOOKED_UP_CHAINS
from kvatlas.reservations.protocol import MOST_LIKENESSES, MOST_OFFERS
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys

ROUNDS = 5
LIBRARIES = (INDEX_LIBRARY, POOL_LIBRARY, FLEET_LIBRARY)

POOL = pool_keys("p")
BLOCKS, MARKS, META = "kva:{s0}:blocks:00", "kva:{s0}:marks:00", "kva:{s0}:meta"
MARKED, ACTIVE, WORKERS = "kva:{s0}:marked", "kva:{s0}:active", "kva:{s0}:workers"
HELD = "kva:{s0}:held"
STATES = [WORKERS, *(f"kva:{{s0}}:{part}" for part in ("holders", "active", "digests", "steps", "marked"))]
CHAIN, HOLDERS = 20_000, 64
"""Number of blocks in the chain (no two values are equal), and of the workers that hold them."""
POOL_WORKERS, FAKE_WORKERS = 1_000, 600
RESERVED = 1_500
MOST_US = 10**15
LONG_CHAIN_AT, LONGEST_CHAIN = 2_048, 2_048
"""Half of the predictions have few steps, half as many as one may have: the place of these in the chain, and their number."""

Words = tuple[str | int | bytes, ...]


class HostileCall(NamedTuple):
    """`user`: a user who may make the call. `act`: what makes it long."""

    user: str
    function: str
    act: str
    words: Words


def hash_of(number: int) -> bytes:
    return (number * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big")


def holders_value(number: int) -> bytes:
    """The holders value of a block in the chain: half of the workers, a different half for each block."""
    return b"".join(
        holder.to_bytes(3, "big") + b"\1" for holder in range(HOLDERS) if (number >> (holder % 16)) + holder & 1
    )


CHAIN_HASHES = b"".join(map(hash_of, range(CHAIN)))


def fill_store(client: Redis, chain: int = CHAIN) -> None:
    """Write a shard's blocks and a pool with bookings, as in a large fleet, and what a rogue router adds to them."""
    for library in LIBRARIES:
        client.function_load(library.code, replace=True)
    for first in range(0, chain, 1_000):
        some = range(first, min(first + 1_000, chain))
        client.hset(BLOCKS, mapping={hash_of(one): holders_value(one) for one in some})
    names: dict[Any, Any] = {number.to_bytes(3, "big"): f"w{number}" for number in range(HOLDERS)}
    client.hset(ACTIVE, mapping=names)
    client.hset(META, mapping={"active": 1, "server": "x"})
    client.hset(STATES[1], mapping={holder: msgpack.packb(["a", name, 0]) for holder, name in names.items()})
    record = [b"\0" * 8, 1, b"", b"", 0, 0, 0, b"\0" * 8, -1, 0, 0]
    for holder, name in names.items():
        packed = msgpack.packb([*record[:2], holder, *record[3:]], use_bin_type=False)
        client.hset(WORKERS, name, packed)
    client.hset(MARKED, mapping=dict.fromkeys(names, b"\0"))
    heads: dict[Any, Any] = {hash_of(number) + b"h": _head(number) for number in range(0, min(chain, 20_000), 64)}
    client.hset(MARKS, mapping=heads)
    for first in range(0, POOL_WORKERS, 20):
        rows = [_report(number) for number in range(first, first + 20)]
        client.execute_command(*_fcall(POOL_LIBRARY.function("kvatlas_pool_report"), POOL, _pack(rows)))  # type: ignore[no-untyped-call]
    book = POOL_LIBRARY.function("kvatlas_pool_book")
    for number in range(RESERVED):
        worker = f"w{number % POOL_WORKERS}" if number < RESERVED - FAKE_WORKERS else f"fake{number}"
        begin = LONG_CHAIN_AT * 8 * (number % 2)
        hashes = CHAIN_HASHES[begin : begin + 8 * (LONGEST_CHAIN if number % 2 else 10)]
        ask = _pack([1.0, [[128, hashes]], _kind(1), [worker, 0, 0, 0, 1.0, 1.0], 0, 0, [], [], 0, 0, 0, [], []])
        words = _fcall(book, POOL, number.to_bytes(16, "big"), "rogue", MOST_US, MOST_US, 100, ask)
        client.execute_command(*words)  # type: ignore[no-untyped-call]
    client.hset(ejections_key("p"), mapping={f"x{n}": _pack([1.0e15, 1.0, 1.0, 0, 0, "", 0]) for n in range(20_000)})
    client.hset(answers_key("p"), mapping={f"x{n}": b"%d %s" % (10**16, b"x" * 100) for n in range(20_000)})
    client.zadd(object_keys("a")[2], {f"x{n}": 1.0 for n in range(20_000)})
    client.hset(POOL[-1], mapping={f"w{n}": _pack([1, 1.0, [1.0] * 40]) for n in range(POOL_WORKERS)})


def hostile_calls() -> Iterator[HostileCall]:
    """All hostile calls. Calls that an auditor may make too are listed as the auditor's."""
    for function, act, keys, args in _reading():
        library = POOL_LIBRARY if function.startswith("kvatlas_pool") else INDEX_LIBRARY
        yield HostileCall("auditor", function, act, ("FCALL_RO", *_fcall(library.function(function), keys, *args)[1:]))
    for function, act, keys, args in _writing():
        library = POOL_LIBRARY if function.startswith("kvatlas_pool") else FLEET_LIBRARY
        yield HostileCall("router", function, act, _fcall(library.function(function), keys, *args))


Call = tuple[str, str, tuple[str, ...], tuple[Any, ...]]


def _reading() -> Iterator[Call]:
    overlap = (BLOCKS, META, MARKED, MARKS)
    long = CHAIN_HASHES[:8] * 261_000
    yield "kvatlas_overlap", "a chain of 2 MB of one block", overlap, (long, 1, "", 0)
    yield "kvatlas_overlap", "2 MB, read block by block", overlap, (long, 0, 0, 10**6)
    for stride in (0, 1, 64, 256):
        yield "kvatlas_overlap", f"no two values equal, stride {stride}", overlap, (CHAIN_HASHES, stride, 0, CHAIN)
    for step in (1, 100, CHAIN // 200):
        guesses = b"".join(number.to_bytes(4, "big") for number in range(0, CHAIN, step))
        yield "kvatlas_overlap", f"guesses {step} apart", overlap, (CHAIN_HASHES, 256, 0, CHAIN, guesses)
    reached = b"".join(n.to_bytes(3, "big") + CHAIN.to_bytes(4, "big") for n in range(HOLDERS)) * 1_000
    yield "kvatlas_resume", "a long chain, many holders", (MARKED, MARKS), (CHAIN_HASHES, 0, CHAIN, reached)
    yield "kvatlas_active", "all", (ACTIVE, META), (0, 1_000)
    yield "kvatlas_active", "of the blocks", (BLOCKS, META), (0, 1_000)
    yield "kvatlas_held", "many scopes", (BLOCKS,) * 512, ("x",) * 256
    yield "kvatlas_locate", "one block", (BLOCKS, ACTIVE), (CHAIN_HASHES[:8],)
    yield "kvatlas_look", "many blocks", (*STATES, BLOCKS), ("w1", CHAIN_HASHES[:4_080])
    yield "kvatlas_look", "many scopes", (*STATES, *(BLOCKS,) * 63), ("w1", *(CHAIN_HASHES[:64],) * 63)
    fields = [hash_of(number) + b"h" for number in range(0, 20_000, 64)]
    looked = (*STATES, MARKS)
    yield "kvatlas_look_marks", "many fields", looked, ("w1", _pack(fields))
    yield "kvatlas_look_marks", "one field, very often", looked, ("w1", _pack([b"x"] * 2_000))
    workers = [f"w{number}" for number in range(64)]
    yield "kvatlas_scrub", "all workers", (BLOCKS, *STATES), ("", 0, 1_000, *workers)
    yield "kvatlas_scrub_marks", "all workers", (MARKS, *STATES), ("", 0, 1_000, *workers)
    yield "kvatlas_scopes_idle", "a thousand", (POOL[9],), (0, 1_000)
    yield "kvatlas_room", "once", (META,), ()
    yield "kvatlas_pool_booked", "many ids", POOL, (b"\0" * 16,) * 1_024
    yield "kvatlas_pool_learned", "all", POOL, ()
    for act, ask in _asks().items():
        yield "kvatlas_pool_look", act, POOL, (ask,)


def _writing() -> Iterator[Call]:
    for act, ask in _asks().items():
        yield "kvatlas_pool_book", act, POOL, (b"\1" * 16, "r", MOST_US, MOST_US, 100, ask)
    yield (
        "kvatlas_pool_book",
        "a pair",
        POOL,
        (b"\1" * 16, "r", MOST_US, MOST_US, 100, _asks()["many offers"], b"\2" * 16),
    )
    yield "kvatlas_pool_beat", "many bookings are over", POOL, ("rogue", 0)
    yield "kvatlas_pool_leave", "many bookings", POOL, ("rogue",)
    outcomes = [word for n in range(64) for word in (n.to_bytes(16, "big"), "failed")]
    yield "kvatlas_pool_ends", "failures", POOL, (MOST_US, *outcomes)
    off = [word for n in range(64) for word in (b"%016d" % n, "called_off")]
    yield "kvatlas_pool_ends", "cancelled", POOL, (MOST_US, *off)
    rows = [[f"w{n}", 1.0, 0.5, 0.5, [1.0] * 12] for n in range(256)]
    yield "kvatlas_pool_learn", "many workers", POOL, (_pack([1, *rows]), 5)
    yield "kvatlas_pool_learn", "long sums", POOL, (_pack([1, ["w1", 1.0, 0.5, 0.5, [1.0] * 6_000]]), 5)
    failed = [[f"y{n}", 0.0, 9.0, "eject", 0, MOST_US] for n in range(256)]
    ejections = (ejections_key("p"),)
    yield "kvatlas_pool_ejections", "many workers", ejections, ("r", 1, 1, MOST_US, _pack(failed))
    yield "kvatlas_pool_answered", "many routers", (answers_key("p"),), ("r", MOST_US, 256, b"x" * 16_000)
    yield "kvatlas_pool_report", "many workers", POOL, (_pack([_report(n, sampled=2) for n in range(24)]),)
    yield "kvatlas_pool_report", "as the last one's booking", POOL, (_pack([_report(n, covered=0) for n in range(24)]),)
    yield "kvatlas_pool_mend", "once", POOL, ("x" * 60_000,)
    yield "kvatlas_pool_forget", "a worker", POOL, ("w1",)
    draw = [number for _ in range(256) for number in (10**9, -(10**9), 10**9)]
    yield "kvatlas_fleet_draw", "many clients", tuple(allowance_key(f"requests:{n}") for n in range(256)), tuple(draw)
    yield "kvatlas_fleet_draw", "too many", (allowance_key("x"),) * 2_666, (1,) * 7_998
    objects = [word for n in range(512) for word in (f"resp_{n}", "w1")]
    yield "kvatlas_fleet_put_objects", "many", object_keys("a"), (100_000, 10, "a", *objects)
    yield "kvatlas_fleet_put_objects", "many tenants", object_keys("a"), (1, 10**9, "a", "resp_1", "w1")
    yield "kvatlas_fleet_find_object", "one", object_keys("a")[:2], ("resp_1",)


def _asks() -> dict[str, bytes]:
    def ask(
        offers: Sequence[Any] = (),
        skipped: Sequence[Any] = (),
        chains: Sequence[Any] = (),
        alike: Sequence[Any] = (),
        kinds: int = 1,
        lookup: Any = 0,
        sources: Sequence[Any] = (),
        fetches: Sequence[Any] = (),
    ) -> bytes:
        kind_rows = _kind(1 if chains else 0) * kinds
        return _pack([1.0, chains, kind_rows, offers, 0, 0, alike, skipped, 0, 0, lookup, sources, fetches])

    def looked_up(number: int, hashes: int, most: int = 10**9) -> bytes:
        cut = [[1, CHAIN_HASHES[n * 8 : (n + hashes) * 8]] for n in range(number)]
        rows = range(MOST_LIKENESSES if number > 1 else 1)
        alike = [word for n in rows for word in (_likeness(2 * n + 1), 0, 0, 0, 1.0e12, 1.0e12)]
        reuse = [word for n in rows for word in (n % number + 1, most, 0, 0, 1, 1)]
        return ask(alike=alike, lookup=[BLOCKS, ACTIVE, WORKERS, HELD, b"", cut, reuse, [], "", 0, []])

    def offers(number: int, name: str = "w") -> list[Any]:
        return [word for n in range(number) for word in (f"{name}{n}", 0, 0, 0, 1.0, 1.0)]

    chained = [[128, CHAIN_HASHES[: LONGEST_CHAIN * 8]]]
    long = [[128, CHAIN_HASHES[LONG_CHAIN_AT * 8 : (LONG_CHAIN_AT + LONGEST_CHAIN) * 8]]]
    return {
        "many offers": ask(offers(MOST_OFFERS)),
        "many offers to unknown workers": ask(offers(MOST_OFFERS, "new")),
        "a long chain": ask(offers(1), chains=chained),
        "a long chain, many offers, many predictions": ask(offers(MOST_OFFERS), chains=chained),
        "long predictions, many offers": ask(offers(MOST_OFFERS), chains=long),
        "a prompt of many predictions": ask(offers(1), chains=[[128, CHAIN_HASHES[:80]]]),
        "one prompt in many chains": ask(offers(1), chains=[[128, CHAIN_HASHES[:80]]] * 16),
        "many look-alikes": ask(alike=[_likeness(0), 0, 0, 0, 1.0, 1.0]),
        "the same look-alikes, often": ask(alike=[_likeness(0), 0, 0, 0, 1.0, 1.0] * MOST_LIKENESSES),
        "many likenesses, a long chain": ask(
            alike=[word for n in range(MOST_LIKENESSES) for word in (_likeness(n), 0, 0, 0, 1.0, 1.0)], chains=chained
        ),
        "too many likenesses": ask(alike=[_likeness(0), 0, 0, 0, 1.0, 1.0] * 256),
        "many workers left out": ask(offers(1), skipped=[f"w{n}" for n in range(256)]),
        "a lookup of a long chain": looked_up(1, 8_192),
        "a lookup of many chains": looked_up(MOST_LOOKED_UP_CHAINS, 2_000),
        "a lookup of many chains that save nothing": looked_up(MOST_LOOKED_UP_CHAINS, 2_000, 0),
        "a lookup of too many chains": looked_up(MOST_LOOKED_UP_CHAINS + 1, 1),
        "many kinds": ask(offers(1), kinds=1_500),
        "many sources of one offer": ask(
            offers(1), sources=[f"w{n}" for n in range(5_000)], fetches=[[1, 5, *range(1, 5_001)]]
        ),
        "many fetches of one offer": ask(offers(1), sources=["w"], fetches=[[1, 5, 1]] * 10_000),
    }


def _kind(chain: int) -> list[Any]:
    return [chain, 10**9, 0, 40.0, 5_000.0, 5.0, 1_024, 40.0, 0.0005, 0.0, MOST_US, 10**9, 0.0]


def _report(number: int, *, sampled: int = 1, covered: int = -1) -> list[Any]:
    return [f"w{number}", "", str(sampled), 1, 0, covered, 100, 3, 2, 1_000, _likeness(number), 100, 10**6, 2]


def _likeness(number: int) -> bytes:
    """Half of the workers are of one kind, the rest of all others."""
    return (number % MOST_LIKENESSES if number % 2 else 0).to_bytes(8, "big")


def _head(number: int) -> bytes:
    return b"".join(n.to_bytes(3, "big") + (number * n % (1 << 64)).to_bytes(8, "big") for n in range(HOLDERS))


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=False)
    return packed


def _fcall(function: str, keys: tuple[str, ...], *args: str | int | bytes) -> Words:
    return ("FCALL", function, len(keys), *keys, *args)


def measure(binary: Path | None = None) -> list[Result]:
    with ValkeyProcess(binary=binary) as server, Redis.from_url(server.url) as client:
        fill_store(client)
        times = Path(f"/proc/{server.pid}/schedstat")
        return [
            Result(f"{call.user}: {call.function}, {call.act}{answer}", ms, "ms", LONGEST_MS)
            for call in hostile_calls()
            for ms, answer in [min(_time(client, times, call) for _ in range(ROUNDS))]
        ]


def _time(client: Redis, times: Path, call: HostileCall) -> tuple[float, str]:
    """The CPU time in ms, and the error if the call was refused."""
    before, answer = int(times.read_text().split()[0]), ""
    try:
        client.execute_command(*call.words)  # type: ignore[no-untyped-call]
    except ResponseError as error:
        answer = f" ({error!s:.60})"
    client.ping()  # the server's work after its answer counts too
    return (int(times.read_text().split()[0]) - before) / 1e6, answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=Path)
    binary = parser.parse_args().binary
    Console(width=170).print(tabulate(measure(binary), f"longest calls of functions, {binary or 'embedded Valkey'}"))
