"""A shared store outlives its writers, and the index has exactly what was written."""

import random
from contextlib import AsyncExitStack
from typing import Any

import msgpack

from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.index.redis.index import open_redis_index
from tests.chaos.child_process import ChildProcess
from tests.chaos.exactness import Residence
from tests.chaos.fleet import MODEL, PARTITIONS, Fleet
from tests.chaos.load import BLOCK, VOCABULARY
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.indexers import restart_indexer, wait_until_taken_over
from tests.eventually import until
from tests.publishers.fake_engine import FakeEngine

STORE = "chaos-store"
CHAIN_BLOCKS = 8
CACHED_CHAINS = 10
"""Chains in a writer's own cache. Everything that it wrote stays in the store."""


class Writer:
    """An engine that computes prompts of CHAIN_BLOCKS, and writes each block that the store does not have yet into it."""

    def __init__(self, fleet: Fleet, name: str, engine: FakeEngine, salt: int) -> None:
        """`salt`: makes its block hashes differ from those of all other engines."""
        self.name = name
        self._engine = engine
        self._salt = salt
        self._told = fleet.checker.told
        self._told[name] = set()
        self._cached: list[tuple[list[int], set[Residence]]] = []
        self._made = 0
        arguments = ["publish", "--engine", "mock", "--worker-id", name, "--endpoint", engine.endpoint]
        arguments += ["--replay-endpoint", engine.replay_endpoint, "--shared-store", STORE, *_common(fleet)]
        self.sidecar = ChildProcess(f"{name}-sidecar", arguments, "is published", fleet.folder)

    async def compute(self, prompt: list[int], in_store: int) -> None:
        """`in_store`: number of its first blocks that were read from the store."""
        names = [self._salt + self._made + at for at in range(CHAIN_BLOCKS)]
        self._made += CHAIN_BLOCKS
        keys = [hash_text(key) for key in unpack_hashes(extend_chain(prompt, BLOCK))]
        events: list[list[Any]] = [["BlockStored", names, None, prompt, BLOCK, None, "GPU"]]
        parent = names[in_store - 1] if in_store else None
        new = prompt[in_store * BLOCK :]
        events.append(["BlockStored", names[in_store:], parent, new, BLOCK, None, "MOONCAKE"])
        self._cached.append((names, {(None, "hbm", key) for key in keys}))
        self._told[self.name] |= self._cached[-1][1]
        self._told[STORE] |= {(None, "object_store", key) for key in keys[in_store:]}
        if len(self._cached) > CACHED_CHAINS:
            evicted, gone = self._cached.pop(0)
            events.append(["BlockRemoved", evicted[::-1], "GPU"])
            self._told[self.name] -= gone
        await self._engine.send(bytes(msgpack.packb([0.0, events, None])))

    def kill(self) -> None:
        """Kill the writer. Its engine is gone too, and sends nothing more."""
        self.sidecar.kill()
        del self._told[self.name]


def _common(fleet: Fleet) -> list[str]:
    return ["--model-id", MODEL, "--block-size", str(BLOCK), "--partitions", str(PARTITIONS),
            "--nats-url", fleet.nats_server.url]  # fmt: skip


async def shared_store_outlives_its_writer(run: ScenarioRun) -> None:
    """The first writer dies and is retired, while a second one continues its chains, an indexer is killed and the store's own
    publisher restarts."""
    fleet, rng = run.fleet, random.Random(7)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(CHAIN_BLOCKS * BLOCK)] for _ in range(60)]
    forks = [[*one[: 5 * BLOCK], *(rng.randrange(VOCABULARY) for _ in range(3 * BLOCK))] for one in prompts[:30]]
    async with AsyncExitStack() as stack:
        stack.callback(fleet.checker.told.clear)
        fleet.checker.told[STORE] = set()
        arguments = ["publish", "--engine", "store", "--worker-id", STORE, "--store-ttl-s", "3600"]
        arguments += ["--state-dir", str(fleet.folder / f"{STORE}-state"), *_common(fleet)]
        publisher = ChildProcess(STORE, arguments, "is published", fleet.folder)
        engines = [await stack.enter_async_context(FakeEngine()) for _ in range(2)]
        first, second = [Writer(fleet, f"chaos-writer-{i}", one, (i + 1) << 32) for i, one in enumerate(engines)]
        children = [publisher, first.sidecar, second.sidecar]
        for child in children:
            stack.callback(child.close)
            child.start()
        for child, engine in zip(children, [None, *engines], strict=True):
            await child.ready()
            if engine is not None:
                await engine.subscribed()

        for prompt in prompts[:30]:
            await first.compute(prompt, in_store=0)
        await run.wait_until_exact()  # until then, what a writer has not reported is lost with it
        first.kill()
        run.record_fault("writer of a shared store SIGKILL")

        for fork in forks[:15]:
            await second.compute(fork, in_store=5)
        indexer = fleet.indexers[0]
        indexer.child.kill()
        run.record_fault("indexer SIGKILL")
        for prompt in prompts[30:]:
            await second.compute(prompt, in_store=0)
        await wait_until_taken_over(fleet, indexer)
        await restart_indexer(run, indexer)
        await _wait_until_retired(fleet, first.name)
        await run.wait_until_exact()

        await publisher.stop()
        run.record_fault("publisher of a shared store SIGTERM")
        publisher.start()
        await publisher.ready()
        for fork in forks[15:]:
            await second.compute(fork, in_store=5)
        run.mark_healed()
        await run.wait_until_exact()
        blocks = await fleet.checker.resident_blocks(STORE)
        assert blocks == 60 * CHAIN_BLOCKS + 30 * 3, f"{run.name}: the store has {blocks} blocks"
    await _retire(fleet, [STORE, second.name])


async def _wait_until_retired(fleet: Fleet, worker_id: str) -> None:
    index = await open_redis_index(fleet.store, writer=False)

    async def is_retired() -> bool:
        record = await index.record(worker_id)
        return record is not None and record.closed and not record.answering

    await until(is_retired, deadline_s=60, what=f"{worker_id} is retired")


async def _retire(fleet: Fleet, worker_ids: list[str]) -> None:
    """Retire workers whose publishers have ended, as indexers do after a while."""
    index = await open_redis_index(fleet.store, writer=True)
    for worker_id in worker_ids:
        record = await index.record(worker_id)
        assert record is not None, f"{worker_id} was known"
        await index.retire(worker_id, record.incarnation)


SCENARIOS = (shared_store_outlives_its_writer,)
