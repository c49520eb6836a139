"""Memory a block: of the index, with one holder and for each further one, and of the process that follows the engines."""

import anyio

from benchmarks.peer.comparison import Comparison
from benchmarks.peer.engine_process import CHAIN, last_chain
from benchmarks.peer.pipelines import PIPELINES, running_pipeline
from benchmarks.process_usage import usage_of
from kvatlas.store.connection import Store

HOLDERS = 8
HASHES = 64
MESSAGES = 2_048
DEADLINE_S = 120
POLL_S = 0.05


async def measure(_: Store, rounds: int = 1) -> list[Comparison]:
    """Every turn has a store of its own."""
    first: dict[str, list[float]] = {who: [] for who in PIPELINES}
    further: dict[str, list[float]] = {who: [] for who in PIPELINES}
    ledger: list[float] = []
    idle: dict[str, list[float]] = {}
    for _round in range(rounds):
        for who in PIPELINES:
            blocks = MESSAGES * HASHES
            async with running_pipeline(who, HOLDERS, HASHES) as (engines, pipeline):
                for part, pid in pipeline.pids.items():
                    idle.setdefault(f"{who} {part}", []).append(usage_of(pid).rss_bytes / (1 << 20))
                index = [await pipeline.index_bytes()]
                publisher = pipeline.pids.get("publisher")
                ledger_before = usage_of(publisher).rss_bytes if publisher else 0
                for holders in ((0, 1), (1, HOLDERS)):
                    await engines.start(f"prepare {MESSAGES} {holders[0]} {holders[1]} same")
                    await engines.results()
                    await engines.start("publish 0")
                    await engines.results(DEADLINE_S)
                    with anyio.fail_after(DEADLINE_S):
                        for engine in range(*holders):
                            while await pipeline.depth(engine, last_chain("same", HASHES, MESSAGES)) < CHAIN:
                                await anyio.sleep(POLL_S)
                    index.append(await pipeline.index_bytes())
                first[who].append((index[1] - index[0]) / blocks)
                further[who].append((index[2] - index[1]) / blocks / (HOLDERS - 1))
                if publisher:
                    ledger.append((usage_of(publisher).rss_bytes - ledger_before) / blocks / HOLDERS)
    return [
        Comparison("memory of the index a block, one holder", "bytes", first["ours"], first["theirs"]),
        Comparison(f"  for each further holder, up to {HOLDERS}", "bytes", further["ours"], further["theirs"]),
        Comparison("memory of the publisher a block and engine", "bytes", ledger, []),
        *(Comparison(f"idle memory, our {part}", "MiB", idle[f"ours {part}"], []) for part in ("publisher", "indexer")),
        Comparison("idle memory, their indexer", "MiB", [], idle["theirs indexer"]),
    ]
