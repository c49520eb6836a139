"""The scheduler: what each step computes, in which order, and what it costs."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from simulator.cache.block_changes import BlocksStored, GpuCleared
from simulator.cache.block_hash import Namespace, SeededBlockHasher
from simulator.cache.kv_cache import KVCache
from simulator.engine.generation import GenerationRequest, QueueFull, RequestTooLarge
from simulator.engine.scheduler import EngineCore, SchedulerLimits, StepResult
from simulator.engine.step_cost import StepCost
from tests.simulator.cache.event_fold import EventFold

RATES = StepCost(
    prefill_us_per_token=10,
    decode_step_us=1_000,
    decode_us_per_sequence=100,
    decode_us_per_kv_token=1,
    swap_in_us_per_block=7,
)


def an_engine(num_blocks: int = 64, *, num_cpu_blocks: int = 0, limits: SchedulerLimits | None = None) -> EngineCore:
    """Blocks of 4 tokens."""
    cache = KVCache(num_blocks=num_blocks, block_size=4, hasher=SeededBlockHasher(1), num_cpu_blocks=num_cpu_blocks)
    return EngineCore(cache, limits=limits or SchedulerLimits(), cost=RATES)


def a_request(name: str, prompt_tokens: int, max_tokens: int = 1, *, start: int = 0) -> GenerationRequest:
    return GenerationRequest(name, tuple(range(start, start + prompt_tokens)), max_tokens)


def run_all(engine: EngineCore) -> list[StepResult]:
    """Steps until there is no work."""
    results: list[StepResult] = []
    while engine.has_work:
        results.append(engine.step(results[-1].ended_us if results else 0.0))
        assert len(results) < 5_000, "it doesn't come to an end"
    return results


def answer(results: list[StepResult], name: str, choice: int = 0) -> list[int]:
    return [
        token.token_id
        for result in results
        for token in result.tokens
        if (token.request_id, token.choice) == (name, choice)
    ]


def cached_tokens(results: list[StepResult], name: str) -> int:
    return next(token.cached_tokens for result in results for token in result.tokens if token.request_id == name)


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = an_engine(limits=SchedulerLimits(max_num_batched_tokens=10))
    engine.submit(a_request("long", 25))
    results = run_all(engine)
    assert [result.prefill_tokens for result in results] == [10, 10, 5]
    assert [len(result.tokens) for result in results] == [0, 0, 1]


def test_running_sequences_come_before_waiting_ones_within_the_budget() -> None:
    engine = an_engine(limits=SchedulerLimits(max_num_batched_tokens=10))
    engine.submit(a_request("first", 6, max_tokens=3))
    engine.submit(a_request("second", 20, start=100))
    results = run_all(engine)
    assert [(result.prefill_tokens, result.decode_sequences) for result in results] == [(10, 0), (9, 1), (7, 1)]


def test_a_step_takes_as_long_as_its_work() -> None:
    engine = an_engine()
    engine.submit(a_request("s", 12, max_tokens=2))
    prefill, decode = run_all(engine)
    assert prefill.ended_us - prefill.started_us == 12 * 10
    assert decode.started_us == prefill.ended_us
    assert decode.ended_us - decode.started_us == 1_000 + 100 + 13 * 1


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = an_engine()
    for name in ("cold", "again"):
        engine.submit(a_request(name, 8))
        results = run_all(engine)
    assert cached_tokens(results, "again") == 4 and results[0].prefill_tokens == 4


def test_generated_tokens_become_blocks_but_the_last_one_does_not() -> None:
    engine = an_engine()
    engine.submit(a_request("first", 4, max_tokens=5))
    results = run_all(engine)
    prompt = (0, 1, 2, 3, *answer(results, "first"))
    assert len(prompt) == 9
    stored = [change for result in results for change in result.changes if isinstance(change, BlocksStored)]
    assert [change.token_ids for change in stored] == [prompt[:4], prompt[4:8]]
    assert stored[1].parent_hash == stored[0].block_hashes[0]
    engine.submit(GenerationRequest("next turn", (*prompt, 77), 1))
    assert cached_tokens(run_all(engine), "next turn") == 8


def test_a_steps_changes_come_with_that_step() -> None:
    engine = an_engine(limits=SchedulerLimits(max_num_batched_tokens=4))
    engine.submit(a_request("s", 8))
    step = engine.begin_step(0.0)
    result = engine.end_step(step)
    assert [type(change) for change in result.changes] == [BlocksStored]
    (stored,) = result.changes
    assert isinstance(stored, BlocksStored) and stored.token_ids == (0, 1, 2, 3)


def test_answers_depend_on_model_prompt_and_choice_only() -> None:
    def tokens(engine: EngineCore, request: GenerationRequest) -> list[int]:
        engine.submit(request)
        return answer(run_all(engine), request.request_id)

    base = a_request("a", 10, max_tokens=8)
    alone = tokens(an_engine(), base)
    busy = an_engine(limits=SchedulerLimits(max_num_batched_tokens=3))
    busy.submit(a_request("other", 30, max_tokens=9, start=50))
    assert tokens(busy, base) == alone
    assert tokens(an_engine(), replace(base, prompt=(*base.prompt[:-1], 99))) != alone
    assert tokens(an_engine(), replace(base, namespace=Namespace(adapter="lora"))) != alone


def test_the_answers_of_one_request_share_its_prompt_and_copy_the_partial_block() -> None:
    engine = an_engine()
    engine.submit(replace(a_request("s", 6, max_tokens=4), choices=3))
    results = run_all(engine)
    answers = [answer(results, "s", choice) for choice in range(3)]
    assert [len(each) for each in answers] == [4, 4, 4] and len({tuple(each) for each in answers}) == 3
    assert engine.cache.stats().copies == 2, "the last one to write has the block for itself"
    assert sum(result.prefill_tokens for result in results) == 6


def test_no_more_sequences_run_than_allowed() -> None:
    engine = an_engine(limits=SchedulerLimits(max_num_seqs=3))
    engine.submit(replace(a_request("two", 4, max_tokens=3), choices=2))
    engine.submit(replace(a_request("two more", 4, max_tokens=3, start=20), choices=2))
    engine.submit(a_request("one", 4, max_tokens=3, start=40))
    while engine.has_work:
        engine.step(0.0)
        assert engine.load.running <= 3


def test_a_full_queue_refuses() -> None:
    engine = an_engine(limits=SchedulerLimits(max_num_seqs=1, queue_limit=2))
    for name in ("a", "b"):
        engine.submit(a_request(name, 4))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(a_request("c", 4))
    engine.step(0.0)
    engine.submit(a_request("c", 4))


def test_a_request_that_can_never_run_is_refused() -> None:
    engine = an_engine(4)
    with pytest.raises(RequestTooLarge, match="expected at most 16"):
        engine.submit(a_request("s", 15, max_tokens=2))
    engine.submit(a_request("s", 15, max_tokens=1))
    assert len(run_all(engine)) == 1


def test_the_youngest_sequence_is_preempted_and_still_gets_its_whole_answer() -> None:
    roomy, tight = an_engine(64), an_engine(9)
    for engine in (roomy, tight):
        engine.submit(a_request("old", 12, max_tokens=12))
        engine.submit(a_request("young", 12, max_tokens=12, start=100))
    expected, results = run_all(roomy), run_all(tight)
    assert tight.load.preemptions_total > 0 and roomy.load.preemptions_total == 0
    for name in ("old", "young"):
        assert answer(results, name) == answer(expected, name)
    halfway = results[: len(results) // 2]
    assert len(answer(halfway, "old")) > len(answer(halfway, "young"))
    assert tight.cache.available_blocks == 9


def test_at_critical_pressure_nobody_is_admitted_while_others_run() -> None:
    engine = an_engine(20)
    engine.submit(a_request("big", 76, max_tokens=3))
    engine.step(0.0)
    engine.submit(a_request("small", 2, start=200))
    engine.step(0.0)
    assert (engine.load.running, engine.load.waiting) == (1, 1)
    assert answer(run_all(engine), "small")


def test_given_up_requests_free_their_blocks_also_within_a_step() -> None:
    engine = an_engine()
    engine.submit(a_request("gone", 12, max_tokens=5))
    engine.submit(a_request("stays", 12, max_tokens=1, start=50))
    step = engine.begin_step(0.0)
    engine.abort("gone")
    assert [token.request_id for token in engine.end_step(step).tokens] == ["stays"]
    assert not engine.has_work and engine.cache.available_blocks == 64
    engine.abort("gone")


def test_swapping_in_takes_time() -> None:
    engine = an_engine(4, num_cpu_blocks=8)
    engine.submit(a_request("a", 12))
    run_all(engine)
    engine.submit(a_request("b", 15, start=50))
    run_all(engine)
    engine.submit(a_request("a again", 12))
    (result,) = run_all(engine)
    assert result.swapped_in_blocks == 2
    assert result.ended_us - result.started_us == 4 * 10 + 2 * 7


def test_a_reset_waits_for_running_requests_or_preempts_them() -> None:
    engine = an_engine()
    engine.submit(a_request("s", 8, max_tokens=3))
    engine.step(0.0)
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(preempt_running=True)
    assert engine.take_changes() == (GpuCleared(),)
    results = run_all(engine)
    assert results[0].prefill_tokens == 9 and len(answer(results, "s")) == 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_load_comes_to_an_end_with_every_answer_whole_and_every_change_told(data: st.DataObject) -> None:
    limits = SchedulerLimits(
        max_num_seqs=data.draw(st.integers(2, 5)), max_num_batched_tokens=data.draw(st.integers(1, 20))
    )
    engine = an_engine(data.draw(st.integers(4, 14)), num_cpu_blocks=data.draw(st.sampled_from([0, 3])), limits=limits)
    fold = EventFold(4)
    expected: dict[tuple[str, int], int] = {}
    results: list[StepResult] = []
    for number in range(data.draw(st.integers(1, 8))):
        request = GenerationRequest(
            f"r{number}",
            tuple(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=10))),
            data.draw(st.integers(1, 6)),
            choices=data.draw(st.integers(1, 2)),
        )
        engine.submit(request)
        expected.update({(request.request_id, choice): request.max_tokens for choice in range(request.choices)})
        if data.draw(st.booleans()):
            results.append(engine.step(0.0))
    results += run_all(engine)
    for result in results:
        assert result.prefill_tokens + result.decode_sequences <= limits.max_num_batched_tokens
        fold.apply(result.changes)
    assert {key: len(answer(results, *key)) for key in expected} == expected
    finished = [(t.request_id, t.choice) for result in results for t in result.tokens if t.finish_reason]
    assert sorted(finished) == sorted(expected)
    assert engine.cache.available_blocks == engine.cache.num_blocks
    stats = engine.cache.stats()
    assert sum(fold.copies.values()) == stats.cached_blocks + stats.cpu_blocks
