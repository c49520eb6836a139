"""The longest store call with extreme index shapes: large snapshots, values with many holders, many scopes, many workers.
`python -m benchmarks.stalls` measures them on Valkey and, with `--binary PROGRAM`, on another server.

A store call delays every other client, so this bounds how long a router's choice waits. Other programs on the machine, and
other machines on its host, prolong a call's wall-clock time, so the budget is for the CPU time of the server's main thread. The
wall-clock times of the longest call and of calls that only compute are printed beside it.
"""

import argparse
import os
import random
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop
from rich.console import Console

from benchmarks.result import Result, tabulate
from benchmarks.store_calls import LONGEST_MS, TimedStore
from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import partition_of
from kvatlas.embedded import valkey_server
from kvatlas.events import IndexEvent, Message, Removed, ScopeUse, SnapshotChunk, Stored
from kvatlas.identity import Scope, shard_of
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import connected_store
from kvatlas_publishers.stream.outbox import Outbox

BLOCK_SIZE = 16
CALL_MESSAGES = 64
SWEEP_BLOCKS, SCRUB_BLOCKS = 2_000, 500
"""The amounts that indexers sweep and scrub."""

COMPUTING_CALLS = 200
COMPUTING = "local n = 0 for i = 1, 80000 do n = n + i % 7 end return n"
"""A call that only computes, for one or two milliseconds of CPU time."""

Contents = dict[Scope, bytes]
"""Packed hashes by scope."""


class BenchedWorker:
    """A worker's publisher, without a bus."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._outbox = Outbox(worker_id)

    def snapshot(self, contents: Contents) -> list[wire.RawMessage]:
        """A new incarnation with these blocks, as publishers cut it."""
        digest = Digest()
        uses = {scope.scope_id: ScopeUse(scope, BLOCK_SIZE) for scope in contents}
        chunks = []
        for scope, hashes in contents.items():
            digest.add(scope.scope_id, Tier.HBM, hashes)
            for first in range(0, len(hashes), 512 * HASH_BYTES):
                part = hashes[first : first + 512 * HASH_BYTES]
                chunks.append(SnapshotChunk(scope.scope_id, Tier.HBM, part, None, first // HASH_BYTES))
        self._outbox.begin(self._outbox.incarnation + 1, chunks, digest.words, uses, 1)
        messages = []
        while (outgoing := self._outbox.take()) is not None:
            messages.append(wire.decode_raw(outgoing.payload))
            self._outbox.acknowledge(outgoing.round, outgoing.seq, outgoing.seq + 1)
        return messages

    def message(self, scope: Scope, event: IndexEvent) -> wire.RawMessage:
        """One message of the largest size that the bus accepts."""
        seq = self._outbox.next_seq
        uses = {scope.scope_id: ScopeUse(scope, BLOCK_SIZE)}
        self._outbox.put([event], uses, 1)
        assert self._outbox.next_seq == seq + 1
        while (outgoing := self._outbox.take()) is not None:
            self._outbox.acknowledge(outgoing.round, outgoing.seq, outgoing.seq + 1)
        return wire.to_raw(Message(self.worker_id, self._outbox.incarnation, seq, [event], uses, 1))


async def apply_messages(index: ResidencyIndex, messages: Iterable[wire.RawMessage]) -> None:
    """Apply messages like an applier without a stream: several per call, at most about 64 KiB unless one is larger."""
    some: list[wire.RawMessage] = []
    size = 0
    for message in messages:
        message_bytes = sum(len(event[wire.HASHES]) for event in message[wire.EVENTS] if len(event) > wire.HASHES)
        if some and (len(some) == CALL_MESSAGES or size + message_bytes > 64 * 1024):
            await _apply(index, some)
            some, size = [], 0
        some.append(message)
        size += message_bytes
    if some:
        await _apply(index, some)


async def _apply(index: ResidencyIndex, messages: Sequence[wire.RawMessage]) -> None:
    by_partition: dict[int, list[wire.RawMessage]] = {}
    for message in messages:
        by_partition.setdefault(partition_of(message[wire.WORKER_ID], index.partitions), []).append(message)
    batches = [PartitionBatch(partition, some) for partition, some in by_partition.items()]
    await index.apply(shard_of(0, 1), batches)


async def _sweep(index: RedisIndex) -> None:
    while await index.sweep(0, SWEEP_BLOCKS):
        pass


async def _scrub(index: RedisIndex) -> None:
    while not (found := await index.scrub(0, SCRUB_BLOCKS)).ended:
        assert not found.damaged


async def _retire_all(index: RedisIndex) -> None:
    for record in await index.records(0):
        await index.retire(record.worker_id, record.incarnation)


async def snapshots(index: RedisIndex) -> AsyncIterator[str]:
    """One worker of 300,000 blocks, then 64 of 5,000 equal blocks that all restart, and sweeps."""
    scope = Scope("bench", "large")
    large = BenchedWorker("large")
    await apply_messages(index, large.snapshot({scope: os.urandom(300_000 * HASH_BYTES)}))
    yield "snapshot of 300,000 blocks"
    hashes = os.urandom(5_000 * HASH_BYTES)
    fleet = [BenchedWorker(f"w{number}") for number in range(64)]
    for _ in range(2):
        await apply_messages(index, (message for worker in fleet for message in worker.snapshot({scope: hashes})))
    yield "64 workers restart"
    await _sweep(index)
    yield "sweep after 64 restarts"
    await _retire_all(index)
    await _sweep(index)
    yield "sweep of 300,000 blocks"


async def values_of_many_holders(index: RedisIndex) -> AsyncIterator[str]:
    """256 workers, each of which holds a different half of 8,000 blocks: no two values are equal, and each is 512 bytes."""
    scope = Scope("bench", "values")
    rng = random.Random(7)
    blocks = [os.urandom(HASH_BYTES) for _ in range(8_000)]
    fleet = [BenchedWorker(f"w{number}") for number in range(256)]
    for worker in fleet:
        await apply_messages(index, worker.snapshot({scope: b"".join(rng.sample(blocks, 4_000))}))
    yield "256 snapshots, no two values equal"
    everything = b"".join(blocks)
    stored, removed = Stored(scope.scope_id, Tier.CPU_DRAM, everything), Removed(scope.scope_id, Tier.HBM, everything)
    for event in (stored, removed):
        await apply_messages(index, [fleet[0].message(scope, event)])
    many = Stored(scope.scope_id, Tier.CPU_DRAM, os.urandom(60_000 * HASH_BYTES))
    await apply_messages(index, [fleet[1].message(scope, many)])
    yield "messages of 8,000 and 60,000 blocks"
    await _scrub(index)
    yield "scrub of 256 workers"
    await index.recount([worker.worker_id for worker in fleet[:32]])
    yield "recount of 32 workers"
    await _retire_all(index)
    await _sweep(index)
    yield "sweep of 256 retired holders"


async def many_scopes(index: RedisIndex) -> AsyncIterator[str]:
    """Two workers with one block in each of 20,000 scopes."""
    scopes = [Scope("bench", "scopes", None, f"tenant-{number}") for number in range(20_000)]
    fleet = [BenchedWorker(f"w{number}") for number in range(2)]
    for worker in fleet:
        await apply_messages(index, worker.snapshot({scope: os.urandom(HASH_BYTES) for scope in scopes}))
    yield "snapshots of 20,000 scopes"
    await _scrub(index)
    yield "scrub of 20,000 scopes"
    await index.retire("w0", 1)
    await _sweep(index)
    yield "sweep of 20,000 scopes"
    blocks = await index.length()
    assert blocks == len(scopes)
    while await index.forget_scopes(0):
        pass
    yield "20,000 scopes in use are looked at"
    await index.retire("w1", 1)
    await _sweep(index)
    while await index.forget_scopes(0):
        pass
    yield "20,000 scopes forgotten"


async def many_workers(index: RedisIndex) -> AsyncIterator[str]:
    """20,000 workers."""
    scope = Scope("bench", "workers")
    hashes = os.urandom(4 * HASH_BYTES)
    fleet = [BenchedWorker(f"worker-{number}") for number in range(20_000)]
    await apply_messages(index, (message for worker in fleet for message in worker.snapshot({scope: hashes})))
    yield "20,000 workers begin"
    assert len(await index.records(0)) == len(fleet)
    yield "records of 20,000 workers"
    assert len((await index.overlap(scope, hashes)).depths()) == len(fleet)
    yield "names of 20,000 holders"
    await index.metrics()
    yield "metrics of 20,000 workers"
    position = await index.set_position(0, None, Position(1, 1))
    await index.set_position(0, position, Position(2, 0))
    yield "a position replaced"
    await index.clear()
    yield "cleared"


SHAPES: tuple[Callable[[RedisIndex], AsyncIterator[str]], ...] = (
    snapshots,
    values_of_many_holders,
    many_scopes,
    many_workers,
)


USUAL = (snapshots, values_of_many_holders)
"""The shapes that fleets of usual size encounter."""


async def measure(
    shapes: Sequence[Callable[[RedisIndex], AsyncIterator[str]]] = SHAPES, binary: Path | None = None
) -> list[Result]:
    results = []
    async with _store(binary) as store:
        for shape in shapes:
            await store.client.flushall()
            index = await open_redis_index(store, shards=1, writer=True)
            store.forget()
            async for step in shape(index):
                results += _longest_calls(store, step)
                store.forget()
            results.append(await _compute(store))
    return results


def _longest_calls(store: TimedStore, step: str) -> list[Result]:
    longest, by_clock = store.by_processor, store.by_clock
    computing = f"{by_clock.processor:.1f} ms of it computing, {by_clock.waited:.1f} ms waiting for a processor"
    return [
        Result(f"CPU time of the longest store call, {step}: {longest.command}", longest.processor, "ms", LONGEST_MS),
        Result(f"  by the clock: {by_clock.command} ({computing})", by_clock.clock, "ms"),
    ]


async def _compute(store: TimedStore) -> Result:
    """The wall-clock time of calls that only compute, as a reference: what exceeds their CPU time is not their own work."""
    store.forget()
    for _ in range(COMPUTING_CALLS):
        await store.client.eval(COMPUTING, 0)
    one = store.by_clock
    name = (
        f"  for comparison: of {COMPUTING_CALLS} calls that compute for {one.processor:.1f} ms the longest by the clock"
    )
    return Result(name, one.clock, "ms")


@asynccontextmanager
async def _store(binary: Path | None) -> AsyncIterator[TimedStore]:
    async with valkey_server(binary=binary) as server, connected_store(server.url, wait=False) as store:
        try:
            # other programs that interrupt a call prolong it: that is not measured here
            os.setpriority(os.PRIO_PROCESS, server.pid, -20)
        except PermissionError:
            Console(stderr=True).print("the server runs at the usual priority: other programs' work is measured too")
        timed = TimedStore(store, server.pid)
        await timed.open()
        yield timed


async def _main(binary: Path | None, names: Sequence[str]) -> None:
    chosen = [shape for shape in SHAPES if not names or shape.__name__ in names]
    for shape in chosen:
        Console(width=160).print(
            tabulate(await measure([shape], binary), f"{binary or 'embedded Valkey'}: {shape.__name__}")
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=Path)
    parser.add_argument("shapes", nargs="*", help=", ".join(shape.__name__ for shape in SHAPES))
    arguments = parser.parse_args()
    uvloop.run(_main(arguments.binary, arguments.shapes))
