"""Many engines for one sidecar: its memory and its CPU time per block, with 1, 16 and 64 engines."""

from rich.table import Table

from benchmarks.peer.comparison import Subject
from benchmarks.peer.engine_process import CHAIN, last_chain
from benchmarks.peer.pipelines import running_pipeline
from benchmarks.process_usage import usage_of
from benchmarks.scaling.processor_time import Stretch

ENGINES = (1, 16, 64)
HASHES, MESSAGES = 16, 4_096
"""Hashes per message, and messages of all engines together."""


async def report() -> list[Table]:
    table = Table(
        *("engines", "sidecar's memory when it starts, MiB", "after the events, MiB", "a block, us"),
        title=f"one sidecar for all engines, {HASHES} blocks a message, {HASHES * MESSAGES:,} blocks",
    )
    for count in ENGINES:
        async with running_pipeline(Subject.OURS, count, HASHES) as (engines, pipeline):
            pid, messages = pipeline.pids["publisher"], MESSAGES // count
            await engines.start(f"prepare {messages} 0 {count} own")
            await engines.results()
            at_first, stretch = usage_of(pid).rss_bytes, Stretch({"publisher": pid})
            await engines.start("publish 0")
            for engine in range(count):
                tokens = last_chain(engine, HASHES, messages)
                while await pipeline.depth(engine, tokens) < CHAIN:
                    pass
            await engines.results()
            cost_us = stretch.cpu_s()["publisher"] / (HASHES * messages * count) * 1e6
            sizes = [f"{size / 2**20:.0f}" for size in (at_first, usage_of(pid).rss_bytes)]
            table.add_row(str(count), *sizes, f"{cost_us:.1f}")
    return [table]
