"""The pool and the prompts that `route` is measured with.

Seven eighths of a prompt's blocks are one of PREFIXES shared prefixes, which every worker holds to a different depth; the rest
is unique. So each choice prices every worker, and books a new prefix.
"""

import os
import random
import time

from benchmarks.fleet_records import BLOCK_SIZE, routable_record
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from router_client import Prompt

SCOPE = Scope("bench", "bench")
WORKERS, BLOCKS = 64, 512
PREFIXES = 8


class RouteWorkload:
    """The same numbers give the same workload in every process."""

    def __init__(self, workers: int, blocks: int) -> None:
        self.workers = workers
        self.blocks = blocks
        rng = random.Random(workers * 100_003 + blocks)
        shared = blocks - blocks // 8
        self._tokens = [[rng.randrange(100_000) for _ in range(shared * BLOCK_SIZE)] for _ in range(PREFIXES)]
        self._chains = [extend_chain(tokens, BLOCK_SIZE) for tokens in self._tokens]
        self._prompts = 0

    async def write(self, store: Store, *, shards: int | None = None) -> None:
        """Empty the store, and write the workers and what they hold into it."""
        await store.client.flushall()
        index = await open_redis_index(store, shards=shards, writer=True)
        use = ScopeUse(SCOPE, BLOCK_SIZE)
        rng = random.Random(1)
        for chain in self._chains:
            held = len(chain) // HASH_BYTES
            ranks = rng.sample(range(self.workers), self.workers)
            for worker, rank in enumerate(ranks):
                depth = max(1, held * (rank + 1) // self.workers)
                await index.put(use, f"w{worker:03}", Tier.HBM, chain[: HASH_BYTES * depth])
        await self.write_load(store)

    async def write_load(self, store: Store) -> None:
        """Write the workers' fleet records with a current load, as publishers report it each second."""
        rng = random.Random(2)
        loads = [
            WorkerState(
                id=f"w{number:03}",
                sampled_us=time.time_ns() // 1_000,
                queued_prefill_tokens=rng.randrange(4_000),
                running_decodes=rng.randrange(32),
            )
            for number in range(self.workers)
        ]
        await FleetStore(store).write({load.id: routable_record(SCOPE, load) for load in loads})

    def hashed_prompt(self) -> Prompt:
        """The next prompt, as precomputed hashes."""
        return Prompt.of_hashes(SCOPE, self.hashes(), BLOCK_SIZE, input_tokens=self.blocks * BLOCK_SIZE + 7)

    def hashes(self) -> bytes:
        """The hashes of the next prompt."""
        self._prompts += 1
        return self._chains[self._prompts % PREFIXES] + os.urandom(self.blocks // 8 * HASH_BYTES)

    def token_prompt(self) -> Prompt:
        """The next prompt, as token ids."""
        self._prompts += 1
        unique = random.Random(os.urandom(8)).choices(range(100_000), k=self.blocks // 8 * BLOCK_SIZE + 7)
        return Prompt.of_tokens(SCOPE, [*self._tokens[self._prompts % PREFIXES], *unique])
