"""Simulates the engines' work on a burst, after routers have placed its requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fleet_records import BLOCK_SIZE
from benchmarks.spread.burst import OUTPUT_TOKENS, Burst, worker_name
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.scheduler import SchedulerLimits

NUM_BLOCKS = 65_536


@dataclass(frozen=True, slots=True)
class Spread:
    """The outcome of a burst. `queued_tokens`: prompt tokens that each worker had to compute."""

    queued_tokens: Sequence[int]
    hit_rate: float
    ttft_ms: Sequence[float]
    copies: float
    """The mean number of workers that computed a prefix, over the prefixes that no worker held at the start."""

    @property
    def fullest(self) -> float:
        """The tokens queued at the fullest worker, as a multiple of the mean."""
        return max(self.queued_tokens) * len(self.queued_tokens) / sum(self.queued_tokens)

    @property
    def mean_ttft_ms(self) -> float:
        return sum(self.ttft_ms) / len(self.ttft_ms)


def simulate(burst: Burst, placements: Sequence[tuple[int, str]]) -> Spread:
    """Every worker computes its requests, in the order of `placements` (request, worker); all arrive at the same moment."""
    engines = [
        EngineCore(
            KVCache(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, hasher=SeededBlockHasher(1)),
            limits=SchedulerLimits(max_num_seqs=256, queue_limit=len(placements) + 1),
        )
        for _ in range(burst.workers)
    ]
    numbers = {worker_name(number): number for number in range(burst.workers)}
    for prefix, worker in burst.warm.items():
        engines[worker].submit(GenerationRequest(f"warm-{prefix}", tuple(burst.prefixes[prefix]), 1))
        while engines[worker].has_work:
            engines[worker].step(0.0)
    computed_by: dict[int, set[str]] = {}
    for request, worker_id in placements:
        prompt = tuple(burst.prompt(request))
        engines[numbers[worker_id]].submit(GenerationRequest(str(request), prompt, OUTPUT_TOKENS))
        prefix = burst.requests[request][0]
        if prefix not in burst.warm:
            computed_by.setdefault(prefix, set()).add(worker_id)
    queued, hits, ttft_ms = [], 0, []
    prompt_tokens = sum(len(burst.prompt(request)) for request, _ in placements)
    for engine in engines:
        now_us, started, cached = 0.0, set[str](), 0
        before = engine.load
        while engine.has_work:
            step = engine.step(now_us)
            now_us = step.ended_us
            for token in step.tokens:
                if token.request_id not in started:
                    started.add(token.request_id)
                    cached += token.cached_tokens
                    ttft_ms.append(now_us / 1_000)
        hits += cached
        queued.append(engine.load.prompt_tokens_total - before.prompt_tokens_total - cached)
    copies = sum(len(workers) for workers in computed_by.values()) / max(1, len(computed_by))
    return Spread(queued, hits / prompt_tokens, sorted(ttft_ms), copies)
