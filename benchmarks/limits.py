"""The best figures that this machine allows, a baseline for all others: `python -m benchmarks.limits`.

They are a loopback round trip to a server that does nothing, the store's commands without functions, and the hashing of a
prompt. Whatever calls the store, changes a block there or starts from token ids can't be faster.
"""

import os
import socket
from functools import partial

import uvloop
from rich.console import Console

from benchmarks.result import Result, tabulate
from benchmarks.stores import store_cpu_s, valkey_store
from benchmarks.timing import quantile, time_async_calls, time_calls
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, pack_tokens
from kvatlas.store.connection import Store
from kvatlas.store.redis_connections import RedisConnections

CALLS = 3_000
FIELDS, HOLDER_BYTES = 256, 4
BLOCKS, BLOCK_SIZE = 512, 16
TIMEOUT_S = 5.0
PING = b"*1\r\n$4\r\nPING\r\n"


async def measure(store: Store) -> list[Result]:
    return [
        *_measure_hashing(),
        await _measure_round_trip(store),
        _measure_bare_round_trip(store),
        *await _fields(store),
    ]


def _measure_hashing() -> list[Result]:
    tokens = list(range(100_000, 100_000 + BLOCKS * BLOCK_SIZE))
    name = f"a prompt of {len(tokens):,} tokens"
    chain_us, pack_us = (
        quantile(time_calls([call] * 300), 0.5) * 1e6
        for call in (partial(extend_chain, tokens, BLOCK_SIZE), partial(pack_tokens, tokens))
    )
    return [
        Result(f"hash chain of {name}, {BLOCKS} blocks", chain_us, "us"),
        Result("  of it token ids to bytes", pack_us, "us"),
    ]


async def _measure_round_trip(store: Store) -> Result:
    connections = RedisConnections(store.client.connection_pool.make_connection, TIMEOUT_S)
    ping = partial(connections.call, [("PING",)], retry=True)
    times = await time_async_calls([ping] * CALLS)
    await connections.close()
    return Result("PING of the store by the router's connections, p50", quantile(times, 0.5) * 1e6, "us")


def _measure_bare_round_trip(store: Store) -> Result:
    host, port = store.url.removeprefix("redis://").rsplit(":", 1)
    with socket.create_connection((host, int(port.split("/")[0]))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ping() -> None:
            connection.sendall(PING)
            connection.recv(64)

        times = time_calls([ping] * CALLS)
    return Result("the same by a blocking socket, p50", quantile(times, 0.5) * 1e6, "us")


async def _fields(store: Store) -> list[Result]:
    """The store's CPU time for each field of a large command."""
    rounds = 400
    keys = [[os.urandom(HASH_BYTES) for _ in range(FIELDS)] for _ in range(rounds)]
    before_s = await store_cpu_s(store)
    for some in keys:
        await store.client.hset("limits", mapping=dict.fromkeys(some, some[0][:HOLDER_BYTES]))
    written_s = await store_cpu_s(store)
    for some in keys:
        await store.client.hmget("limits", some)
    read_s = await store_cpu_s(store)
    await store.client.unlink("limits")
    return [
        Result(f"HSET of {FIELDS} new blocks, each", (written_s - before_s) / rounds / FIELDS * 1e6, "us"),
        Result(f"HMGET of {FIELDS} blocks, each", (read_s - written_s) / rounds / FIELDS * 1e6, "us"),
    ]


async def _report() -> None:
    async with valkey_store() as store:
        Console(width=110).print(tabulate(await measure(store), "at best"))


if __name__ == "__main__":
    uvloop.run(_report())
