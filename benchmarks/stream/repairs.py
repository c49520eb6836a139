"""Time from publication to visibility while the index repairs itself: a sidecar of 64 ranks that hold 500,000 blocks publishes
2,000 messages per second, snapshots of a worker with 300,000 blocks are applied one after another, and 64 workers that cleared
their caches are swept.

    python -m benchmarks.stream.repairs
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count

import anyio
import anyio.lowlevel
import uvloop
from nats.aio.client import Client
from rich.console import Console

from benchmarks.child_processes import Child, child_process, server_process
from benchmarks.peer.engine_process import CHAIN, last_chain
from benchmarks.peer.engines import Engines
from benchmarks.peer.ours.pool import SCOPE
from benchmarks.peer.pipelines import WORKER, OurPipeline, free_ports, our_pipeline
from benchmarks.peer.prompts import BLOCK_SIZE
from benchmarks.peer.visibility import see_one
from benchmarks.process_usage import usage_of
from benchmarks.result import Result, tabulate
from benchmarks.scaling.processor_time import Stretch
from benchmarks.store_calls import store_calls
from benchmarks.timing import quantile
from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import ControlOp, ControlRequest
from kvatlas.bus.subjects import control_subject

RANKS, RANK_BLOCKS = 64, 7_872
HASHES = 4
"""Blocks per message. A chain has 64 blocks, a multiple of it."""
RATE = 2_000
FILL_RATE = 8_000
"""Messages per second. Without a limit, more blocks would wait in the sidecar than its ranks hold."""
MESSAGES = 320
"""Measured messages per rank: ten seconds' worth."""
LARGE_BLOCKS, LEAVING_BLOCKS = 300_032, 4_096
OTHER = "other"
"""The sidecar for the engine with LARGE_BLOCKS (rank 0) and for the 64 engines that clear their caches."""
SETTLED_S = 1.0
FILLED_S = 300
QUIET_PROBES = 100
P99_MS, RANKS_P99_MS = 10.0, 25.0
POLL_S = 0.05


async def measure() -> list[Result]:
    async with AsyncExitStack() as stack:
        first_port = free_ports(RANKS + 1)
        probe = stack.enter_context(Engines(1, first_port + RANKS))
        ranks = await stack.enter_async_context(_engines(first_port, RANKS, HASHES))
        other_port = free_ports(RANKS + 1)
        others = await stack.enter_async_context(_engines(other_port, RANKS + 1, CHAIN))
        pipeline = await stack.enter_async_context(our_pipeline(first_port, RANKS + 1))
        other = await stack.enter_async_context(_other_sidecar(pipeline, other_port))
        return await _measure_phases(pipeline, ranks, others, probe, other)


def _engines(first_port: int, count: int, hashes: int) -> AbstractAsyncContextManager[Child]:
    return child_process("benchmarks.peer.engine_process", [str(first_port), str(count), str(hashes)])


@asynccontextmanager
async def _other_sidecar(pipeline: OurPipeline, first_port: int) -> AsyncIterator[int]:
    """Start the sidecar; yields its process."""
    args = ["publish", "--engine", "vllm", "--worker-id", OTHER, "--model-id", SCOPE.model_id]
    args += [
        "--endpoint",
        f"tcp://127.0.0.1:{first_port}",
        "--dp-size",
        str(RANKS + 1),
        "--nats-url",
        pipeline.nats_url,
    ]
    async with server_process("kvatlas_cli.main", args, "(is published)") as sidecar:
        yield sidecar.pid


class _Repairs:
    """Clear the other engines' caches, then request one snapshot of the large worker after another, until cancelled."""

    def __init__(self, pipeline: OurPipeline, client: Client, others: Child) -> None:
        self.snapshots = 0
        """The number of snapshots applied so far."""
        self._pipeline = pipeline
        self._client = client
        self._others = others

    async def run(self) -> None:
        await self._others.start(f"clear 1 {RANKS + 1}")
        await self._others.results()
        worker = f"{OTHER}-dp0"
        while True:
            record = await self._pipeline.index.record(worker)
            assert record is not None
            request = ControlRequest(op=ControlOp.SNAPSHOT, above=record.incarnation)
            await self._client.publish(control_subject(worker), request.pack())
            while (now := await self._pipeline.index.record(worker)) is None or not (
                now.answering and now.incarnation > record.incarnation and not now.loading
            ):
                await anyio.sleep(POLL_S)
            self.snapshots += 1


async def _measure_phases(
    pipeline: OurPipeline, ranks: Child, others: Child, probe: Engines, other: int
) -> list[Result]:
    sidecar, blocks = pipeline.pids["publisher"], count()
    idle_bytes = usage_of(sidecar).rss_bytes
    await asyncio.to_thread(probe.wait_for_subscribers)
    quiet = sorted([await see_one(probe, pipeline, RANKS, next(blocks)) for _ in range(QUIET_PROBES)])
    await _publish(ranks, RANK_BLOCKS // HASHES, 0, RANKS, FILL_RATE)
    await _wait_for(pipeline, f"{WORKER}-dp{RANKS - 1}", last_chain(RANKS - 1, HASHES, RANK_BLOCKS // HASHES))
    filled_bytes = usage_of(sidecar).rss_bytes
    await _publish(others, LARGE_BLOCKS // CHAIN, 0, 1)
    await _publish(others, LEAVING_BLOCKS // CHAIN, 1, RANKS + 1)
    await _wait_for(pipeline, f"{OTHER}-dp{RANKS}", last_chain(RANKS, CHAIN, LEAVING_BLOCKS // CHAIN))
    await _wait_for(pipeline, f"{OTHER}-dp0", last_chain(0, CHAIN, LARGE_BLOCKS // CHAIN))

    async def see_during(contents: str, beside: Callable[[], Awaitable[None]]) -> list[float]:
        """The sorted seconds until blocks are visible, while the ranks publish them."""
        await ranks.start(f"prepare {MESSAGES} 0 {RANKS} {contents}")
        await ranks.results()
        await ranks.start(f"publish {RATE}")
        await anyio.sleep(SETTLED_S)
        published, repairing = asyncio.create_task(ranks.results()), asyncio.ensure_future(beside())
        seen = []
        while not published.done():
            seen.append(await see_one(probe, pipeline, RANKS, next(blocks)))
        await published
        repairing.cancel()
        for ended in await asyncio.gather(repairing, return_exceptions=True):
            if ended is not None and not isinstance(ended, asyncio.CancelledError):
                raise ended
        return sorted(seen)

    busy = await see_during("busy", anyio.lowlevel.checkpoint)
    client = await connect_nats(pipeline.nats_url, name="kvatlas-bench", wait=False)
    repairs = _Repairs(pipeline, client, others)
    try:
        stretch = Stretch({**pipeline.pids, "the other sidecar": other})
        async with store_calls(pipeline.store) as calls:
            repaired = await see_during("repaired", repairs.run)
            longest = await calls.result("repairs")
    finally:
        await client.close()
    shares = stretch.share()
    held = RANKS * RANK_BLOCKS
    name = f"published to visible, {RATE:,} messages/s of {RANKS} ranks with {held:,} blocks"
    during = f"while {repairs.snapshots} snapshots of {LARGE_BLOCKS:,} blocks are applied and {RANKS} workers are swept"
    return [
        *(Result(f"published to visible, quiet, p{q * 100:g}", quantile(quiet, q) * 1e3, "ms") for q in (0.5, 0.99)),
        Result(f"{name}, p50", quantile(busy, 0.5) * 1e3, "ms"),
        Result("..., p99", quantile(busy, 0.99) * 1e3, "ms", RANKS_P99_MS),
        Result(f"..., {during}, p50", quantile(repaired, 0.5) * 1e3, "ms"),
        Result("..., p99", quantile(repaired, 0.99) * 1e3, "ms", P99_MS),
        longest,
        *(Result(f"processor of {name} meanwhile", share, "cores") for name, share in shares.items()),
        Result(f"memory of a sidecar of {RANKS} ranks, idle", idle_bytes / 2**20, "MiB"),
        Result(f"..., with {held:,} blocks", filled_bytes / 2**20, "MiB"),
    ]


async def _publish(engines: Child, messages: int, first: int, last: int, rate: int = 0) -> None:
    """Publish these engines' own blocks; `rate` 0: as fast as they are taken."""
    await engines.start(f"prepare {messages} {first} {last} own")
    await engines.results()
    await engines.start(f"publish {rate}")
    await engines.results(FILLED_S)


async def _wait_for(pipeline: OurPipeline, worker: str, tokens: list[int]) -> None:
    """Wait until the worker's last chain is found."""
    hashes = extend_chain(tokens, BLOCK_SIZE)
    with anyio.fail_after(FILLED_S):
        while (await pipeline.index.overlap(SCOPE, hashes)).depths().get(worker, 0) < CHAIN:
            await anyio.sleep(POLL_S)


def main() -> None:
    Console(width=150).print(tabulate(uvloop.run(measure()), "published to visible, beside repairs"))


if __name__ == "__main__":
    main()
