"""A fleet of 1,000 workers, simulated: heartbeats, events, restarts of a tenth at once, and the choices of 10 routers.

Publishers, NATS, the store, two indexers and the routers are real and share this machine's cores; the engines, and most of the
events that they would send, are left out. Each process' work is given per heartbeat, block and choice, so that other rates can
be calculated (`docs/scaling.md`).
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from time import perf_counter, process_time

import anyio
from rich.table import Table

from benchmarks.child_processes import child_process, indexer_process
from benchmarks.process_usage import usage_of
from benchmarks.scaling.processor_time import Stretch
from benchmarks.scaling.workers import BLOCK_SIZE, MESSAGE_BLOCKS, worker_name
from benchmarks.store_calls import store_calls
from benchmarks.timing import quantile
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import STREAM
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from router_client import Prompt, RouterClient, RouterSettings

WORKERS, BLOCKS = 1_000, 256
RESTARTED = 100
INDEXERS = 2
ROUTERS, CHOICES = 10, 20
"""Choices of each router, one after another, while all routers run at once."""
PROMPT_TOKENS = 4_096
IDLE_S, EVENTS_S, EVENT_RATE = 10.0, 10.0, 100.0
DEADLINE_S = 240.0
POLL_S = 0.1
SCOPE = Scope("bench", "bench")


async def report(workers: int = WORKERS) -> list[Table]:
    table = Table("1,000 workers" if workers == WORKERS else f"{workers} workers", "figure", title="a fleet, simulated")
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server())
        valkey = await stack.enter_async_context(valkey_server())
        indexers = [await stack.enter_async_context(indexer_process(nats.url, valkey.url)) for _ in range(INDEXERS)]
        store = await stack.enter_async_context(connected_store(valkey.url, wait=False))
        index = await open_redis_index(store, writer=False, wait=True)
        calls = await stack.enter_async_context(store_calls(store))
        client = await connect_nats(nats.url, name="kvatlas-bench", wait=False)
        stack.push_async_callback(client.close)

        async def wait_until_complete(blocks: int) -> None:
            with anyio.fail_after(DEADLINE_S):
                while True:
                    records = {record.worker_id: record for record in await index.records(0)}
                    whole = all(
                        (one := records.get(worker_name(number))) is not None and one.answering and not one.loading
                        for number in range(workers)
                    )
                    if whole and (await index.metrics()).resident_blocks >= blocks:
                        return
                    await anyio.sleep(POLL_S)

        began = perf_counter()
        fleet = await stack.enter_async_context(
            child_process("benchmarks.scaling.workers", [nats.url, str(workers), str(BLOCKS)], ready_s=DEADLINE_S)
        )
        await wait_until_complete(workers * BLOCKS)
        table.add_row(f"started, {BLOCKS} blocks each, all answering after", f"{perf_counter() - began:.1f} s")
        pids = {"publishers (one process)": fleet.pid, "NATS": nats.pid, "store": valkey.pid}
        pids |= {f"indexer {number}": process.pid for number, process in enumerate(indexers, 1)}

        stretch = Stretch(pids)
        await anyio.sleep(IDLE_S)
        idle = stretch.share()
        _add_shares(table, f"{workers} heartbeats a second", idle)
        table.add_row("  a heartbeat, of all", f"{sum(idle.values()) / workers * 1e6:.0f} us")

        before = (await client.jetstream().stream_info(STREAM)).state
        stretch = Stretch(pids)
        await fleet.start(f"events {EVENT_RATE:g} {EVENTS_S:g}")
        (sent,) = await fleet.results()
        shares, blocks = stretch.share(), int(sent) * MESSAGE_BLOCKS
        after = (await client.jetstream().stream_info(STREAM)).state
        _add_shares(table, f"{EVENT_RATE:g} messages per second of {MESSAGE_BLOCKS} blocks besides", shares)
        for name in shares:
            cost_us = (shares[name] - idle[name]) * stretch.seconds / blocks * 1e6
            table.add_row(f"  a block: {name}", f"{cost_us:.1f} us")
        table.add_row("  bytes a message in the stream", f"{(after.bytes - before.bytes) / max(1, int(sent)):.0f}")

        began = perf_counter()
        stretch = Stretch(pids)
        await fleet.start(f"restart {RESTARTED * workers // WORKERS}")
        await fleet.results(DEADLINE_S)
        last = (await client.jetstream().stream_info(STREAM)).state.last_seq
        while max([at.seq if (at := await index.position(one)) else 0 for one in range(index.partitions)]) < last:
            await anyio.sleep(POLL_S)
        await wait_until_complete(workers * BLOCKS)
        table.add_row("a tenth restarted at once, complete after", f"{perf_counter() - began:.1f} s")
        for name, cpu_s in stretch.cpu_s().items():
            table.add_row(f"  CPU time: {name}", f"{cpu_s:.2f} s")

        await _add_choices(table, valkey.url, {"store": valkey.pid})
        for name, pid in pids.items():
            table.add_row(f"memory: {name}", f"{usage_of(pid).rss_bytes / 2**20:.0f} MiB")
        used = int((await store.client.info("memory"))["used_memory"])
        table.add_row("memory of the data in the store, a worker", f"{used / workers / 1024:.1f} KiB")
        if (longest := await calls.longest()) is not None:
            table.add_row(f"longest store call: {longest.command}", f"{longest.ms:.1f} ms")
    return [table]


async def _add_choices(table: Table, redis_url: str, pids: Mapping[str, int]) -> None:
    times: list[float] = []

    async def choose(router: RouterClient, number: int) -> None:
        for i in range(CHOICES):
            start = (number * CHOICES + i) * PROMPT_TOKENS
            began = perf_counter()
            choice = await router.reserve(Prompt.of_tokens(SCOPE, range(start, start + PROMPT_TOKENS)))
            times.append(perf_counter() - began)
            await choice.done()

    async with AsyncExitStack() as stack:
        settings = RouterSettings(deadline_ms=None)
        routers = [
            await stack.enter_async_context(RouterClient.open(redis_url, settings, wait=False)) for _ in range(ROUTERS)
        ]
        for router in routers:
            await router.rank(Prompt.of_tokens(SCOPE, range(BLOCK_SIZE)))  # reads the pool
        stretch, own = Stretch(pids), process_time()
        await asyncio.gather(*(choose(router, number) for number, router in enumerate(routers)))
        choices = ROUTERS * CHOICES
        table.add_row(
            f"{ROUTERS} routers at once: a choice, of a router", f"{(process_time() - own) / choices * 1e6:.0f} us"
        )
        table.add_row("  of the store", f"{stretch.cpu_s()['store'] / choices * 1e6:.0f} us")
        table.add_row("  p50, all of them in one process", f"{quantile(sorted(times), 0.5) * 1e3:.1f} ms")
        stretch, own = Stretch(pids), process_time()
        await anyio.sleep(IDLE_S)
        table.add_row("  an idle router", f"{(process_time() - own) / ROUTERS / IDLE_S * 100:.2f} % of a core")


def _add_shares(table: Table, what: str, shares: Mapping[str, float]) -> None:
    table.add_row(what, f"{sum(shares.values()) * 100:.0f} % of a core, of {os.cpu_count()}")
    for name, share in shares.items():
        table.add_row(f"  {name}", f"{share * 100:.1f} %")
