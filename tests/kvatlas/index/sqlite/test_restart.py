"""A SqliteIndex that is opened again is the one that was closed, or killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import partition_of
from kvatlas.bus.wire import RawMessage
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.sqlite.index import open_sqlite_index
from router_client import Prompt, RouterClient, RouterSettings, StaticFleet
from tests.kvatlas.index.message_source import MessageSource, apply_messages, split
from tests.router_client.pools import hold, pool, worker

SCOPES = (Scope("model", "tokenizer"), Scope("model", "tokenizer", "adapter"))
CHAIN = extend_chain(range(4 * 12), 4)
WORKERS = ("a", "b")
PLACES = {key: (CHAIN[:8], offset) for offset, key in enumerate(split(CHAIN))}

changes = st.lists(
    st.tuples(
        st.sampled_from(
            ["begin", "store", "store", "remove", "mark", "pin", "clear", "retire", "sweep", "scrub", "scopes", "open"]
        ),
        st.sampled_from(WORKERS),
        st.sampled_from(SCOPES),
        st.sampled_from([Tier.HBM, Tier.CPU_DRAM]),
        st.integers(0, 12),
        st.integers(0, 12),
    ),
    max_size=25,
)


async def everything(index: MemoryIndex) -> dict[str, Any]:
    """Everything that an index answers, except its counters and the holders that a sweep leaves."""
    await index.sweep(0, 1 << 20)
    parents = [None, *unpack_hashes(CHAIN)]
    return {
        "residencies": sorted([one async for one in index.snapshot()], key=repr),
        "records": [await index.record(worker_id) for worker_id in WORKERS],
        "digests": [await index.digest(worker_id) for worker_id in WORKERS],
        "resident": await index.resident_blocks(),
        "children": [await index.children(scope, parent) for scope in SCOPES for parent in parents],
        "reach": [(await index.overlap(scope, CHAIN, verify=True)).reach() for scope in SCOPES],
        "depths": [(await index.overlap(scope, CHAIN)).depths() for scope in SCOPES],
        "holders": sorted(index._shards[0].table.holders),
        "pinned": index._shards[0].table.pins.tiers,
    }


@given(changes)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])  # of a busy machine
def test_what_a_file_has_is_what_the_memory_index_has(operations: Sequence[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(_compare, Path(folder) / "index", operations)


async def _compare(path: Path, operations: Sequence[tuple[Any, ...]]) -> None:
    memory = MemoryIndex()
    sources = {name: MessageSource(name, dropped=0 if name == "b" else None, places=PLACES) for name in WORKERS}
    begun: dict[str, int] = dict.fromkeys(WORKERS, 0)
    left = list(operations)
    while True:
        async with open_sqlite_index(path) as index:
            while left and left[0][0] != "open":
                await _carry_out(left.pop(0), sources, begun, (memory, index))
        async with open_sqlite_index(path) as again:
            assert await everything(again) == await everything(memory)
        if not left:
            return
        left.pop(0)


async def _carry_out(
    operation: tuple[Any, ...], sources: dict[str, MessageSource], begun: dict[str, int], both: Sequence[MemoryIndex]
) -> None:
    kind, name, scope, tier, first, last = operation
    source, hashes = sources[name], CHAIN[8 * first : 8 * last]
    message: RawMessage | None = None
    if kind == "begin":
        begun[name] += 1
        message = source.begin(begun[name])
    elif begun[name] and hashes and kind == "store":
        message = source.store(scope, hashes, tier)
    elif begun[name] and hashes and kind == "remove":
        message = source.remove(scope, hashes, tier)
    elif begun[name] and hashes and kind == "mark" and source.dropped is not None:
        message = source.mark(scope, split(hashes), unmark=tier is Tier.CPU_DRAM)
    elif begun[name] and kind == "clear":
        message = source.clear()
    for index in both:
        if message is not None:
            await apply_messages(index, message)
        elif kind == "pin":
            record = await index.record(name)
            if record is not None and record.answering:
                await index._pin(name, scope.scope_id, tier, hashes, pinned=first < 6)
        elif kind == "retire":
            await index.retire(name, begun[name])
        elif kind == "sweep":
            await index.sweep(0, 1 << 20)
        elif kind == "scrub":
            await index.scrub(0, 1 << 20)
        elif kind == "scopes":
            await index.forget_scopes(0.0)


@pytest.mark.anyio
async def test_positions_and_the_layout_are_kept_and_clear_empties_the_file(tmp_path: Path) -> None:
    path, source = tmp_path / "index", MessageSource("a")
    partition = partition_of("a", 8)
    async with open_sqlite_index(path, partitions=8, shards=2) as index:
        await index.set_position(partition, None, Position(70, 5))
        batch = PartitionBatch(partition, [source.begin(1), source.store(SCOPES[0], CHAIN)], Position(70, 7), 5)
        assert (await index.apply(partition % 2, [batch])).applied == 2
    async with open_sqlite_index(path) as index:
        assert (index.partitions, index.shards) == (8, 2)
        assert await index.position(partition) == Position(70, 7)
        assert await index.length() == 12
        await index.clear()
    async with open_sqlite_index(path) as index:
        assert await index.is_empty() and await index.position(partition) is None


@pytest.mark.anyio
async def test_the_sizes_of_blocks_are_kept_by_tier(tmp_path: Path) -> None:
    sizes = {Tier.HBM: 100, Tier.CPU_DRAM: 25}
    async with open_sqlite_index(tmp_path / "index") as index:
        for tier, size in sizes.items():
            await index.put(ScopeUse(SCOPES[0], 4, size), "a", tier, CHAIN)
    async with open_sqlite_index(tmp_path / "index") as index:
        assert {row.tier: row.bytes for row in await index.resident_blocks()} == {
            tier: 12 * size for tier, size in sizes.items()
        }


@pytest.mark.anyio
async def test_a_router_over_the_file_knows_at_once_after_a_restart_who_holds_a_prompt(tmp_path: Path) -> None:
    fleet, tokens = pool(worker("w1"), worker("w2")), list(range(160))
    scope = Scope("model", "tokenizer")
    async with open_sqlite_index(tmp_path / "index") as index:
        await hold(index, fleet["w2"], tokens)
    async with open_sqlite_index(tmp_path / "index") as index:
        router = RouterClient(index, StaticFleet(fleet), RouterSettings(deadline_ms=None))
        choice = await router.reserve(Prompt.of_tokens(scope, tokens), dry_run=True)
    assert (choice.worker_id, choice.result.overlap_blocks) == ("w2", 10)


_WRITER = """
import sys, anyio
from kvatlas.blocks.hashing import extend_chain
from kvatlas.bus.subjects import partition_of
from kvatlas.identity import Scope
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.index.sqlite.index import open_sqlite_index
from tests.kvatlas.index.message_source import MessageSource

async def main():
    source, scope, chain = MessageSource("a"), Scope("model", "tokenizer"), extend_chain(range(4 * 64), 4)
    partition = partition_of("a", 64)
    async with open_sqlite_index(sys.argv[1]) as index:
        await index.set_position(partition, None, Position(1, 0))
        message = source.begin(1)
        for seq in range(1, 1_000_000):
            await index.apply(0, [PartitionBatch(partition, [message], Position(1, seq), seq - 1)])
            print(seq, flush=True)
            message = source.remove(scope, chain) if source.held else source.store(scope, chain)

anyio.run(main)
"""


def test_a_killed_process_leaves_whole_changes_and_all_that_it_had_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "index"
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]
    ) as process:
        assert process.stdout is not None
        confirmed = 0
        for line in process.stdout:
            confirmed = int(line)
            if confirmed == 150:
                os.kill(process.pid, signal.SIGKILL)
    anyio.run(_check_what_was_confirmed, path, confirmed)


async def _check_what_was_confirmed(path: Path, confirmed: int) -> None:
    async with open_sqlite_index(path) as index:
        position, record = await index.position(partition_of("a", 64)), await index.record("a")
        assert position is not None and record is not None
        assert confirmed <= position.seq <= confirmed + 1
        assert record.seq == position.seq - 1
        assert (await index.scrub(0, 1 << 20)).damaged == []
        assert await index.length() == (0 if record.seq % 2 == 0 else 64)
