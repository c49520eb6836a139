"""One busy run for each kind of cache, compared with a recording: events, hits, timing and statistics, to the last bit.

The digests were taken before the cache became a separate interface. A difference means that simulated engines behave
differently; record new ones only if that is the purpose of the change.
"""

from random import Random

import pytest
import xxhash

from kvatlas_simulator.cache.block_hash import Namespace, SeededBlockHasher
from kvatlas_simulator.cache.eviction import BuiltInPolicy
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored, KVEvent
from kvatlas_simulator.engine.core import EngineCore, StepResult
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from tests.simulator.engine.engines import RATES

NAMESPACES = (Namespace(), Namespace(), Namespace(adapter="a"), Namespace(cache_salt="s"))


def busy_run(cache: KVCache) -> list[object]:
    """Run 300 requests with forks, preemptions, swaps, aborts and resets. Returns everything that is visible from outside."""
    random = Random(4)
    engine = EngineCore(cache, limits=SchedulerLimits(max_num_seqs=6, max_num_batched_tokens=24), cost=RATES)
    seen: list[object] = []
    now_us = 0.0
    for number in range(300):
        shared = [random.randrange(3)] * (4 * random.randrange(5))
        own = [random.randrange(4) for _ in range(random.randrange(1, 12))]
        request = GenerationRequest(
            f"r{number}",
            (*shared, *own),
            random.randrange(1, 9),
            random.choice(NAMESPACES),
            choices=random.choice((1, 1, 1, 3)),
        )
        engine.submit(request)
        if number % 41 == 40:
            engine.abort(f"r{number - 2}")
        if number % 60 == 59:
            seen.append(engine.reset_prefix_cache(preempt_running=True, include_cpu=number % 120 == 119))
        while engine.has_work and (engine.load.waiting > 3 or random.random() < 0.5):
            result = engine.step(now_us)
            now_us = result.ended_us
            seen += step_fields(result)
    while engine.has_work:
        result = engine.step(now_us)
        now_us = result.ended_us
        seen += step_fields(result)
    load, stats = engine.load, cache.stats()
    assert load.preemptions_total and stats.copies and stats.evictions and stats.hits
    seen += [load.prompt_tokens_total, load.generation_tokens_total, load.prefix_queries_tokens_total]
    seen += [load.prefix_hits_tokens_total, load.preemptions_total]
    seen += [stats.allocations, stats.hits, stats.misses, stats.evictions, stats.copies]
    seen += [stats.swapped_out, stats.swapped_in, stats.cpu_evictions, stats.cached_blocks, stats.cpu_blocks]
    return seen


def step_fields(result: StepResult) -> list[object]:
    tokens = [(token.request_id, token.choice, token.token_id, token.cached_tokens) for token in result.tokens]
    counts = (result.prefill_tokens, result.decode_sequences, result.swapped_in_blocks, result.preempted)
    return [result.ended_us, counts, tokens, [event_fields(event) for event in result.events]]


def event_fields(event: KVEvent) -> tuple[object, ...]:
    if isinstance(event, BlocksStored):
        lineage = (event.block_hashes, event.parent_hash, event.token_ids)
        return ("stored", *lineage, event.medium.value, event.adapter, event.extra_keys)
    if isinstance(event, BlockRemoved):
        return ("removed", event.block_hash, event.medium.value)
    return ("cleared",)


@pytest.mark.parametrize(
    ("eviction", "num_cpu_blocks", "report_hits", "recorded"),
    [
        (BuiltInPolicy.LRU, 0, False, "a5015cfc87a9a68a4927f5f8fe20f725"),
        (BuiltInPolicy.LRU, 12, True, "f71edd7e98355fe4ca6fcde7444fe8c4"),
        (BuiltInPolicy.FIFO, 12, False, "10b6e868958ee45c7fcde215eef78768"),
        (BuiltInPolicy.FREQUENCY, 12, False, "9a7614c9fdc3bf178d1124167a1eaca7"),
    ],
)
def test_an_engine_behaves_as_recorded(
    eviction: BuiltInPolicy, num_cpu_blocks: int, report_hits: bool, recorded: str
) -> None:
    cache = KVCache(
        num_blocks=14,
        block_size=4,
        hasher=SeededBlockHasher(1),
        eviction=eviction,
        num_cpu_blocks=num_cpu_blocks,
        report_hits=report_hits,
    )
    assert xxhash.xxh3_128_hexdigest(repr(busy_run(cache)).encode()) == recorded
