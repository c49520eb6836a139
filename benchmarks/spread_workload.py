"""A burst of requests on shared prefixes, the fleet that it meets, and what becomes of it on simulated engines."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness, WorkerState
from kvatlas.fleet.store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from simulator.cache.block_hash import SeededBlockHasher
from simulator.cache.kv_cache import KVCache
from simulator.engine.core import EngineCore
from simulator.engine.generation_request import GenerationRequest
from simulator.engine.scheduler import SchedulerLimits

SCOPE = Scope("burst", "burst")
BLOCK_SIZE = 16
NUM_BLOCKS = 65_536
OUTPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Burst:
    """`prefixes` are shared by popularity; `warm` says which worker holds a prefix from the start."""

    workers: int
    prefixes: Sequence[Sequence[int]]
    warm: Mapping[int, int]
    requests: Sequence[tuple[int, Sequence[int]]]

    def prompt(self, number: int) -> list[int]:
        prefix, tail = self.requests[number]
        return [*self.prefixes[prefix], *tail]


def burst(*, requests: int, workers: int, prefixes: int = 48, seed: int = 7) -> Burst:
    """Prefixes of 1,024 to 6,144 tokens, every second one held by one worker; own parts of 32 to 512 tokens."""
    rng = random.Random(seed)
    shared = [[rng.randrange(100_000) for _ in range(rng.randrange(1_024, 6_144, BLOCK_SIZE))] for _ in range(prefixes)]
    weights = [1 / (rank + 4) ** 0.7 for rank in range(prefixes)]
    chosen = rng.choices(range(prefixes), weights, k=requests)
    tails = [[rng.randrange(100_000) for _ in range(rng.randrange(32, 512))] for _ in range(requests)]
    warm = {prefix: rng.randrange(workers) for prefix in range(0, prefixes, 2)}
    return Burst(workers, shared, warm, list(zip(chosen, tails, strict=True)))


def worker_name(number: int) -> str:
    return f"w{number:02}"


async def tell_fleet(store: Store, burst: Burst, now_us: int) -> None:
    """Idle workers, and what they hold."""
    await store.client.flushall()
    index = await open_redis_index(store, writer=True)
    for prefix, worker in burst.warm.items():
        chain = extend_chain(burst.prefixes[prefix], BLOCK_SIZE)
        await index.put(ScopeUse(SCOPE, BLOCK_SIZE), worker_name(worker), Tier.HBM, chain)
    records = {}
    for number in range(burst.workers):
        endpoint = EngineEndpoint(
            id=worker_name(number),
            kind=EngineKind.VLLM,
            model_id=SCOPE.model_id,
            tokenizer_id=SCOPE.tokenizer_id,
            block_size=BLOCK_SIZE,
        )
        load = WorkerState(id=endpoint.id, sampled_us=now_us)
        records[endpoint.id] = FleetRecord(
            endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE, load=load, incarnation=1
        )
    await FleetStore(store).write(records)


@dataclass(frozen=True, slots=True)
class Spread:
    """What became of a burst. `queued_tokens`: prompt tokens that each worker had to compute."""

    queued_tokens: Sequence[int]
    hit_rate: float
    ttft_ms: Sequence[float]
    copies: float
    """Workers that computed a prefix that nobody held, on average."""

    @property
    def fullest(self) -> float:
        """The tokens queued at the fullest worker, in times of the mean."""
        return max(self.queued_tokens) * len(self.queued_tokens) / sum(self.queued_tokens)

    @property
    def mean_ttft_ms(self) -> float:
        return sum(self.ttft_ms) / len(self.ttft_ms)


def simulate(burst: Burst, placed: Sequence[tuple[int, str]]) -> Spread:
    """Every worker computes what it got, in the order of `placed` (request, worker), all there at the same moment."""
    engines = [
        EngineCore(
            KVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, hasher=SeededBlockHasher(1)),
            limits=SchedulerLimits(max_num_seqs=256, queue_limit=len(placed) + 1),
        )
        for _ in range(burst.workers)
    ]
    numbers = {worker_name(number): number for number in range(burst.workers)}
    for prefix, worker in burst.warm.items():
        engines[worker].submit(GenerationRequest(f"warm-{prefix}", tuple(burst.prefixes[prefix]), 1))
        while engines[worker].has_work:
            engines[worker].step(0.0)
    computed: dict[int, set[str]] = {}
    for request, worker_id in placed:
        prompt = tuple(burst.prompt(request))
        engines[numbers[worker_id]].submit(GenerationRequest(str(request), prompt, OUTPUT_TOKENS))
        prefix = burst.requests[request][0]
        if prefix not in burst.warm:
            computed.setdefault(prefix, set()).add(worker_id)
    queued, hits, ttft_ms = [], 0, []
    asked = sum(len(burst.prompt(request)) for request, _ in placed)
    for engine in engines:
        now_us, seen, found = 0.0, set[str](), 0
        mine = engine.load
        while engine.has_work:
            step = engine.step(now_us)
            now_us = step.ended_us
            for token in step.tokens:
                if token.request_id not in seen:
                    seen.add(token.request_id)
                    found += token.cached_tokens
                    ttft_ms.append(now_us / 1_000)
        hits += found
        queued.append(engine.load.prompt_tokens_total - mine.prompt_tokens_total - found)
    copies = sum(len(workers) for workers in computed.values()) / max(1, len(computed))
    return Spread(queued, hits / asked, sorted(ttft_ms), copies)
