"""The virtual engine decides as the simulator's scheduler does, request by request."""

import math
import random
from dataclasses import dataclass

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import BlockRemoved, BlocksStored
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.engine.tokenizer import AnswerTokens
from kvatlas_simulator.hybrid_cache.cache import HybridCache
from kvatlas_simulator.hybrid_cache.groups import Retention, parse_groups
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.requests import LabRequest

BLOCK = 16
COST = StepCost(attention_us_per_token_pair=0.5, overhead_us=300.0)
VOCABULARY = 32_000


@dataclass
class Seen:
    """A request's end. Times in microseconds."""

    cached_tokens: int = -1
    first_token_us: float = math.inf
    finished_us: float = math.inf


@dataclass
class Run:
    seen: dict[int, Seen]
    preemptions: int
    stored: int
    removed: int


def requests_of(seed: int, count: int = 60) -> list[tuple[float, GenerationRequest]]:
    """Prompts that share prefixes or continue after another one's answer, with bursts and pauses."""
    rng = random.Random(seed)
    prefixes = [tuple(rng.choices(range(256, VOCABULARY), k=rng.randint(1, 200))) for _ in range(5)]
    now_us = 0.0
    made: list[tuple[float, GenerationRequest]] = []
    for number in range(count):
        now_us += rng.choice([0.0, rng.uniform(0, 20_000), rng.uniform(0, 300_000)])
        prompt = rng.choice(prefixes) + tuple(rng.choices(range(256, VOCABULARY), k=rng.randint(0, 60)))
        if made and rng.random() < 0.3:
            _, earlier = rng.choice(made)
            answer = AnswerTokens("mock\0", earlier.prompt, 0, VOCABULARY)
            prompt = (*earlier.prompt, *(answer[i] for i in range(earlier.max_tokens)), *prompt[:9])[:500]
        made.append((now_us, GenerationRequest(str(number), prompt, rng.randint(1, 90))))
    return made


def lab_request(number: int, arrival_us: float, request: GenerationRequest, ids: dict[int, int]) -> LabRequest:
    answer = AnswerTokens("mock\0", request.prompt, 0, VOCABULARY)
    tokens = [*request.prompt, *(answer[i] for i in range(request.max_tokens))]
    chain = extend_chain(tokens, BLOCK)
    hashes = [int.from_bytes(chain[at : at + 8], "little") for at in range(0, len(chain), 8)]
    contents = [ids.setdefault(one, len(ids)) for one in hashes]
    if len(tokens) % BLOCK:
        contents.append(1 << 31 | number)
    return LabRequest(number, arrival_us, len(request.prompt), request.max_tokens, tuple(contents), number)


def run_scheduler(layout: CacheLayout, blocks: int, cpu_blocks: int, limits: SchedulerLimits, seed: int) -> Run:
    hasher = SeededBlockHasher(1)
    cache: EngineCache = KVCache(num_blocks=blocks, block_size=BLOCK, hasher=hasher, num_cpu_blocks=cpu_blocks)
    if layout.is_hybrid:
        retention = Retention(layout.retention_interval)
        cache = HybridCache(layout.groups, num_blocks=blocks, block_size=BLOCK, retention=retention, hasher=hasher)
    core = EngineCore(cache, limits=limits, cost=COST, vocab_size=VOCABULARY)
    arrivals = requests_of(seed)
    run = Run({}, 0, 0, 0)
    now_us = 0.0
    while arrivals or core.has_work:
        if not core.has_work:
            now_us = arrivals[0][0]
        while arrivals and arrivals[0][0] <= now_us:
            core.submit(arrivals.pop(0)[1])
        if not core.has_work:
            continue
        step = core.step(now_us)
        now_us = step.ended_us
        for token in step.tokens:
            seen = run.seen.setdefault(int(token.request_id), Seen(token.cached_tokens, now_us))
            if token.finish_reason:
                seen.finished_us = now_us
        run.stored += sum(len(event.block_hashes) for event in step.events if isinstance(event, BlocksStored))
        run.removed += sum(isinstance(event, BlockRemoved) for event in step.events)
    run.preemptions = core.load.preemptions_total
    return run


def run_virtual(layout: CacheLayout, blocks: int, cpu_blocks: int, limits: SchedulerLimits, seed: int) -> Run:
    engine = VirtualEngine(layout.scaled(BLOCK).build(blocks, cpu_blocks, 1), BLOCK, limits, COST)
    ids: dict[int, int] = {}
    arrivals = [(when, lab_request(i, when, one, ids)) for i, (when, one) in enumerate(requests_of(seed))]
    run = Run({}, 0, 0, 0)

    def advance() -> None:
        done = engine.advance()
        for sequence in done.finished:
            number = sequence.request.number
            run.seen[number] = Seen(sequence.cached_tokens or 0, sequence.first_token_us, sequence.finished_us)
        run.stored += sum(len(event.block_hashes) for event in done.events if isinstance(event, BlocksStored))
        run.removed += sum(isinstance(event, BlockRemoved) for event in done.events)

    for when_us, request in arrivals:
        while engine.ends_us < when_us:
            advance()
        engine.submit(EngineRequest(request), when_us)
    while engine.ends_us < math.inf:
        advance()
    run.preemptions = engine.preemptions
    return run


def layout_of(*groups: str, interval: int = 0) -> CacheLayout:
    return CacheLayout(parse_groups(groups), interval)


@pytest.mark.parametrize(
    ("layout", "blocks", "cpu_blocks", "limits"),
    [
        (CacheLayout(), 4_000, 0, SchedulerLimits()),
        (CacheLayout(), 60, 0, SchedulerLimits(max_num_batched_tokens=128)),
        (CacheLayout(), 60, 80, SchedulerLimits(max_num_batched_tokens=512)),
        (CacheLayout(), 300, 0, SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=64)),
        # windows of whole blocks: with others, the oldest block is freed within a step here, a few tokens earlier there
        (layout_of("full", "swa:33"), 4_000, 0, SchedulerLimits()),
        (layout_of("swa:65", "full"), 120, 0, SchedulerLimits(max_num_batched_tokens=128)),
        (layout_of("full", "mamba"), 120, 0, SchedulerLimits(max_num_batched_tokens=512)),
        (layout_of("full", "chunked:64", "swa:33", interval=128), 300, 0, SchedulerLimits(max_num_batched_tokens=256)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_it_serves_requests_as_the_scheduler_does(
    layout: CacheLayout, blocks: int, cpu_blocks: int, limits: SchedulerLimits, seed: int
) -> None:
    expected, found = (run(layout, blocks, cpu_blocks, limits, seed) for run in (run_scheduler, run_virtual))
    assert len(expected.seen) == 60
    assert found.preemptions == expected.preemptions
    assert (found.stored, found.removed) == (expected.stored, expected.removed)
    for number, seen in expected.seen.items():
        one = found.seen[number]
        assert one.cached_tokens == seen.cached_tokens
        assert one.first_token_us == pytest.approx(seen.first_token_us, rel=1e-9)
        assert one.finished_us == pytest.approx(seen.finished_us, rel=1e-9)


def test_small_caches_preempt_so_that_the_comparison_covers_it() -> None:
    assert sum(
        run_virtual(CacheLayout(), 60, 0, SchedulerLimits(max_num_batched_tokens=128), seed).preemptions
        for seed in range(3)
    )


def test_a_request_that_never_fits_is_refused() -> None:
    cache = CacheLayout().build(4, 0, 1)
    engine = VirtualEngine(cache, BLOCK, SchedulerLimits(), StepCost())
    with pytest.raises(InvalidValue, match="request 0 of 60 \\+ 5 tokens never fits a cache of 64 tokens; expected"):
        engine.submit(EngineRequest(LabRequest(0, 0.0, 60, 5, (1, 2, 3, 4, 5), 0)), 0.0)
    cache = layout_of("full", "swa:33").scaled(BLOCK).build(8, 0, 1)
    engine = VirtualEngine(cache, BLOCK, SchedulerLimits(), StepCost())
    with pytest.raises(InvalidValue, match="never fits a cache of 64 tokens, 128 in all groups; expected"):
        engine.submit(EngineRequest(LabRequest(0, 0.0, 60, 5, (1, 2, 3, 4, 5), 0)), 0.0)
