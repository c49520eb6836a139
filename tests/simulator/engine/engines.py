"""Engines and requests for the tests of this folder, and readers of step results."""

from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.engine.core import EngineCore, StepResult
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost

RATES = StepCost(
    prefill_us_per_token=10,
    decode_step_us=1_000,
    decode_us_per_sequence=100,
    decode_us_per_kv_token=1,
    swap_in_us_per_block=7,
)


def make_engine(num_blocks: int = 64, *, num_cpu_blocks: int = 0, limits: SchedulerLimits | None = None) -> EngineCore:
    """An engine with blocks of 4 tokens."""
    cache = KVCache(num_blocks=num_blocks, block_size=4, hasher=SeededBlockHasher(1), num_cpu_blocks=num_cpu_blocks)
    return EngineCore(cache, limits=limits or SchedulerLimits(), cost=RATES)


def make_request(name: str, prompt_tokens: int, max_tokens: int = 1, *, start: int = 0) -> GenerationRequest:
    return GenerationRequest(name, tuple(range(start, start + prompt_tokens)), max_tokens)


def run_to_end(engine: EngineCore) -> list[StepResult]:
    """Step until there is no work left."""
    results: list[StepResult] = []
    while engine.has_work:
        results.append(engine.step(results[-1].ended_us if results else 0.0))
        assert len(results) < 5_000, "the engine never finishes"
    return results


def answer_of(results: list[StepResult], name: str, choice: int = 0) -> list[int]:
    return [
        token.token_id
        for result in results
        for token in result.tokens
        if (token.request_id, token.choice) == (name, choice)
    ]


def cached_tokens_of(results: list[StepResult], name: str) -> int:
    return next(token.cached_tokens for result in results for token in result.tokens if token.request_id == name)
