"""The pool and the prompts that `route` is measured on.

Prompts begin with one of PREFIXES shared prefixes, seven eighths of their blocks, which every worker holds to a depth of its
own; the rest of each is its own. So each choice prices every worker, and books a prefix that is new.
"""

import os
import random
import time

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.fleet.store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from router_client import Prompt

SCOPE = Scope("bench", "bench")
BLOCK_SIZE = 16
PREFIXES = 8


class RouteWorkload:
    """Equal for equal numbers, in every process."""

    def __init__(self, workers: int, blocks: int) -> None:
        self.workers = workers
        self.blocks = blocks
        rng = random.Random(workers * 100_003 + blocks)
        shared = blocks - blocks // 8
        self._tokens = [[rng.randrange(100_000) for _ in range(shared * BLOCK_SIZE)] for _ in range(PREFIXES)]
        self._chains = [extend_chain(tokens, BLOCK_SIZE) for tokens in self._tokens]
        self._asked = 0

    async def tell(self, store: Store) -> None:
        """Fill an empty store with the pool and what it holds."""
        await store.client.flushall()
        index = await open_redis_index(store, writer=True)
        use = ScopeUse(SCOPE, BLOCK_SIZE)
        rng = random.Random(1)
        for chain in self._chains:
            held = len(chain) // HASH_BYTES
            ranks = rng.sample(range(self.workers), self.workers)
            for worker, rank in enumerate(ranks):
                depth = max(1, held * (rank + 1) // self.workers)
                await index.put(use, f"w{worker:03}", Tier.HBM, chain[: HASH_BYTES * depth])
        await self.tell_load(store)

    async def tell_load(self, store: Store) -> None:
        """What publishers tell each second."""
        rng = random.Random(2)
        records = {}
        for number in range(self.workers):
            id = f"w{number:03}"
            endpoint = EngineEndpoint(
                id=id,
                kind=EngineKind.VLLM,
                model_id=SCOPE.model_id,
                tokenizer_id=SCOPE.tokenizer_id,
                block_size=BLOCK_SIZE,
            )
            load = WorkerState(
                id=id,
                sampled_us=time.time_ns() // 1_000,
                queued_prefill_tokens=rng.randrange(4_000),
                running_decodes=rng.randrange(32),
            )
            records[id] = FleetRecord(
                endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE, load=load, incarnation=1
            )
        await FleetStore(store).write(records)

    def hashed_prompt(self) -> Prompt:
        """The next prompt, as ready hashes."""
        return Prompt.of_hashes(SCOPE, self.hashes(), BLOCK_SIZE, input_tokens=self.blocks * BLOCK_SIZE + 7)

    def hashes(self) -> bytes:
        self._asked += 1
        return self._chains[self._asked % PREFIXES] + os.urandom(self.blocks // 8 * HASH_BYTES)

    def token_prompt(self) -> Prompt:
        """The next prompt, as token ids."""
        self._asked += 1
        own = random.Random(os.urandom(8)).choices(range(100_000), k=self.blocks // 8 * BLOCK_SIZE + 7)
        return Prompt.of_tokens(SCOPE, [*self._tokens[self._asked % PREFIXES], *own])
