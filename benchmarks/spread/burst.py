"""A burst of requests with shared prefixes, and the idle fleet that receives it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.fleet_records import BLOCK_SIZE, routable_record
from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import WorkerState
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store

SCOPE = Scope("burst", "burst")
OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Burst:
    """`requests`: (prefix, own tokens) of each; `warm`: the worker that holds a prefix from the start, by prefix."""

    workers: int
    prefixes: Sequence[Sequence[int]]
    warm: Mapping[int, int]
    requests: Sequence[tuple[int, Sequence[int]]]

    def prompt(self, number: int) -> list[int]:
        prefix, tail = self.requests[number]
        return [*self.prefixes[prefix], *tail]


def make_burst(*, requests: int, workers: int, prefixes: int = 48, seed: int = 7) -> Burst:
    """Make a burst: prefixes of 1,024 to 6,144 tokens, drawn by popularity, of which one worker holds every second one;
    32 to 512 own tokens."""
    rng = random.Random(seed)
    shared = [[rng.randrange(100_000) for _ in range(rng.randrange(1_024, 6_144, BLOCK_SIZE))] for _ in range(prefixes)]
    weights = [1 / (rank + 4) ** 0.7 for rank in range(prefixes)]
    drawn = rng.choices(range(prefixes), weights, k=requests)
    tails = [[rng.randrange(100_000) for _ in range(rng.randrange(32, 512))] for _ in range(requests)]
    warm = {prefix: rng.randrange(workers) for prefix in range(0, prefixes, 2)}
    return Burst(workers, shared, warm, list(zip(drawn, tails, strict=True)))


def worker_name(number: int) -> str:
    return f"w{number:02}"


async def write_fleet(store: Store, burst: Burst, now_us: int) -> None:
    """Empty the store, and write idle workers and what they hold into it."""
    await store.client.flushall()
    index = await open_redis_index(store, writer=True)
    for prefix, worker in burst.warm.items():
        chain = extend_chain(burst.prefixes[prefix], BLOCK_SIZE)
        await index.put(ScopeUse(SCOPE, BLOCK_SIZE), worker_name(worker), Tier.HBM, chain)
    loads = [WorkerState(id=worker_name(number), sampled_us=now_us) for number in range(burst.workers)]
    await FleetStore(store).write({load.id: routable_record(SCOPE, load) for load in loads})
