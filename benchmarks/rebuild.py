"""An index of 1,048,576 blocks that lost everything: how long until it is whole again: `python -m benchmarks.rebuild`.

Real servers, two indexers, the publishers of a fleet in one process. FLUSHALL; then until every worker answers with all its
blocks. What is granted to snapshots is heard on the bus: bytes that may be on their way at once.
"""

import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import anyio
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from rich.console import Console

from benchmarks.children import child_process, indexer_process
from benchmarks.rebuild_fleet import worker_name
from benchmarks.result import Result, show
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import GrantReply, GrantRequest
from kvatlas.bus.subjects import ALL_GRANTS, STREAM
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.errors import InvalidValue, LayoutMismatch
from kvatlas.index.protocol import WorkerRecord
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import Store, open_store

WORKERS = 16
BLOCKS = 1 << 20
INDEXERS = 2
LAPS = 3
SETTLE_S = 3.0
"""Between two laps: until nobody doubts any more."""
LONGEST_S = 10.0
POLL_S = 0.05
DEADLINE_S = 120.0
FILL_S = 120.0


@dataclass(slots=True)
class Grants:
    """What was granted to snapshots and has not come: heard on the bus, where a reply may be heard before its request."""

    asked: dict[str, GrantRequest] = field(default_factory=dict)
    answered: dict[str, GrantReply] = field(default_factory=dict)
    open: dict[str, GrantRequest] = field(default_factory=dict)
    peak_bytes: int = 0
    granted: int = 0
    refused: int = 0

    async def listen(self, client: Client) -> None:
        await client.subscribe(ALL_GRANTS, cb=self._on_request)
        await client.subscribe("_INBOX.>", cb=self._on_reply)
        await client.flush()

    async def _on_request(self, msg: Msg) -> None:
        self.asked[msg.reply] = GrantRequest.unpack(msg.data)
        self._pair(msg.reply)

    async def _on_reply(self, msg: Msg) -> None:
        with suppress(InvalidValue):  # the answer to some other question
            self.answered[msg.subject] = GrantReply.unpack(msg.data)
            self._pair(msg.subject)

    def _pair(self, inbox: str) -> None:
        if inbox not in self.asked or inbox not in self.answered:
            return
        request, reply = self.asked.pop(inbox), self.answered.pop(inbox)
        if reply.granted:
            self.granted += 1
            self.open[request.worker_id] = request
            self.peak_bytes = max(self.peak_bytes, sum(one.snapshot_bytes for one in self.open.values()))
        else:
            self.refused += 1

    def heed(self, records: Mapping[str, WorkerRecord]) -> None:
        """These records answer with a snapshot that was granted: it has come."""
        for worker_id, request in list(self.open.items()):
            record = records.get(worker_id)
            if record is not None and record.incarnation >= request.incarnation and not record.loading:
                del self.open[worker_id]


async def measure(store: Store, nats_url: str, *, workers: int = WORKERS, laps: int = 1) -> list[Result]:
    await store.client.flushall()
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        for _ in range(INDEXERS):
            await stack.enter_async_context(indexer_process(nats_url, store.url))
        words = [nats_url, str(workers), str(BLOCKS // workers)]
        await stack.enter_async_context(child_process("benchmarks.rebuild_fleet", words, ready_s=FILL_S))
        names = [worker_name(number) for number in range(workers)]
        await _whole(store, names)
        grants = Grants()
        await grants.listen(client)
        took, first, sent = [], [], []
        for _ in range(laps):
            await anyio.sleep(SETTLE_S)
            before = await _stream_bytes(client)
            began = perf_counter()
            await store.client.flushall()
            first_s = await _whole(store, names, grants)
            took.append(perf_counter() - began)
            first.append(first_s)
            sent.append(await _stream_bytes(client) - before)
    return [
        Result(f"rebuild of {BLOCKS:,} blocks of {workers} workers after FLUSHALL", median(took), "s", LONGEST_S),
        *([Result("  the slowest", max(took), "s")] if laps > 1 else []),
        Result("  until the first worker answers again", median(first), "s"),
        Result("  bytes sent through the stream", median(sent) / 2**20, "MiB"),
        Result("  snapshot bytes granted and not yet there, at most", grants.peak_bytes / 2**20, "MiB"),
        Result("  snapshots granted", grants.granted / laps, "a lap"),
        Result("  snapshots asked to come back later", grants.refused / laps, "a lap"),
    ]


async def _whole(store: Store, names: list[str], grants: Grants | None = None) -> float:
    """Wait until every worker answers with all its blocks; seconds until the first did."""
    began, first_s = perf_counter(), 0.0
    index: RedisIndex | None = None
    with anyio.fail_after(DEADLINE_S):
        while True:
            await anyio.sleep(POLL_S)
            try:
                index = index or await open_redis_index(store, writer=False)
            except LayoutMismatch:  # the indexers have not yet laid it out again
                continue
            records = {record.worker_id: record for record in await index.records(0)}
            if grants is not None:
                grants.heed(records)
            answering = [name for name in names if name in records and records[name].answering]
            if answering and not first_s:
                first_s = perf_counter() - began
            if len(answering) == len(names) and (await index.metrics()).resident_blocks == BLOCKS:
                return first_s


async def _stream_bytes(client: Client) -> int:
    return (await client.jetstream().stream_info(STREAM)).state.bytes


async def _main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else WORKERS
    async with nats_server() as nats, valkey_server() as valkey:
        store = await open_store(valkey.url, wait=False)
        try:
            results = await measure(store, nats.url, workers=workers, laps=LAPS)
        finally:
            await store.close()
    Console(width=130).print(show(results, "rebuild"))


if __name__ == "__main__":
    uvloop.run(_main())
