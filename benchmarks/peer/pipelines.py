"""Both pipelines, from the engines' event sockets to an index that can be queried, each with the processes that a fleet
runs."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from benchmarks.child_processes import Child, child_process, indexer_process, server_process
from benchmarks.peer.comparison import Subject
from benchmarks.peer.dynamo.processes import DynamoIndexer, dynamo_indexer
from benchmarks.peer.dynamo.queries import depths_of
from benchmarks.peer.ours.pool import SCOPE
from benchmarks.peer.prompts import BLOCK_SIZE
from benchmarks.process_usage import usage_of
from kvatlas.blocks.hashing import extend_chain
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.embedded.free_port import free_port, is_free
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store, connected_store

WORKER = "w"
"""Engine r is worker `w-dp<r>`."""


class Pipeline(Protocol):
    """Processes that follow engines, and the index that they fill."""

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids, by part."""

    async def depth(self, engine: int, tokens: Sequence[int]) -> int:
        """The number of leading blocks of a prompt that a router finds at an engine."""

    async def index_bytes(self) -> int:
        """The memory of the index."""


@dataclass(frozen=True, slots=True)
class OurPipeline:
    pids: Mapping[str, int]
    store: Store
    index: ResidencyIndex
    nats_url: str

    async def depth(self, engine: int, tokens: Sequence[int]) -> int:
        overlap = await self.index.overlap(SCOPE, extend_chain(tokens, BLOCK_SIZE))
        return overlap.depths().get(f"{WORKER}-dp{engine}", 0)

    async def index_bytes(self) -> int:
        return int((await self.store.client.info("memory"))["used_memory"])


@dataclass(frozen=True, slots=True)
class TheirPipeline:
    pids: Mapping[str, int]
    indexer: DynamoIndexer

    async def depth(self, engine: int, tokens: Sequence[int]) -> int:
        return depths_of(self.indexer.queries.by_tokens(tokens), BLOCK_SIZE).get(engine, 0)

    async def index_bytes(self) -> int:
        return usage_of(self.indexer.pid).rss_bytes


@asynccontextmanager
async def our_pipeline(first_port: int, engines: int, granularity: int = 1) -> AsyncIterator[OurPipeline]:
    """Run a sidecar for all engines, NATS, an indexer and a separate store. The engines must already be bound."""
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server())
        valkey = await stack.enter_async_context(valkey_server())
        store = await stack.enter_async_context(connected_store(valkey.url, wait=False))
        indexer = await stack.enter_async_context(indexer_process(nats.url, valkey.url))
        args = ["publish", "--engine", "vllm", "--worker-id", WORKER, "--model-id", SCOPE.model_id]
        args += ["--endpoint", f"tcp://127.0.0.1:{first_port}", "--dp-size", str(engines), "--nats-url", nats.url]
        args += ["--granularity", str(granularity)]
        sidecar = await stack.enter_async_context(server_process("kvatlas_cli.main", args, "(is published)"))
        pids = {"publisher": sidecar.pid, "NATS": nats.pid, "indexer": indexer.pid, "store": valkey.pid}
        yield OurPipeline(pids, store, await open_redis_index(store, writer=False), nats.url)


@asynccontextmanager
async def their_pipeline(first_port: int, engines: int) -> AsyncIterator[TheirPipeline]:
    """Run an indexer that follows all engines itself."""
    endpoints = [f"tcp://127.0.0.1:{first_port + number}" for number in range(engines)]
    async with dynamo_indexer(endpoints, BLOCK_SIZE) as indexer:
        yield TheirPipeline({"indexer": indexer.pid}, indexer)


PIPELINES: Mapping[Subject, Callable[[int, int], AbstractAsyncContextManager[Pipeline]]] = {
    Subject.OURS: our_pipeline,
    Subject.THEIRS: their_pipeline,
}
"""The engines that are followed: (the first one's port, their number)."""


@asynccontextmanager
async def running_pipeline(subject: Subject, engines: int, hashes: int) -> AsyncIterator[tuple[Child, Pipeline]]:
    """Run a process of engines that publish this many hashes per message, and one subject that follows them."""
    first_port = free_ports(engines)
    args = [str(first_port), str(engines), str(hashes)]
    async with (
        child_process("benchmarks.peer.engine_process", args) as child,
        PIPELINES[subject](first_port, engines) as pipeline,
    ):
        yield child, pipeline


def free_ports(count: int) -> int:
    """The first of this many consecutive free ports; another process may still take one first."""
    while True:
        first = free_port()
        if all(is_free(first + number) for number in range(count)):
            return first
