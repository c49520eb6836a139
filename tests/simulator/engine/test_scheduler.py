"""The scheduler: what each step computes, in which order, and what is refused."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvatlas_simulator.engine.core import StepResult
from kvatlas_simulator.engine.generation_request import GenerationRequest, QueueFull, RequestTooLarge
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from tests.simulator.cache.event_fold import EventFold
from tests.simulator.engine.engines import answer_of, cached_tokens_of, make_engine, make_request, run_to_end


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = make_engine(limits=SchedulerLimits(max_num_batched_tokens=10))
    engine.submit(make_request("long", 25))
    results = run_to_end(engine)
    assert [result.prefill_tokens for result in results] == [10, 10, 5]
    assert [len(result.tokens) for result in results] == [0, 0, 1]


def test_running_sequences_come_before_waiting_ones_within_the_budget() -> None:
    engine = make_engine(limits=SchedulerLimits(max_num_batched_tokens=10))
    engine.submit(make_request("first", 6, max_tokens=3))
    engine.submit(make_request("second", 20, start=100))
    results = run_to_end(engine)
    assert [(result.prefill_tokens, result.decode_sequences) for result in results] == [(10, 0), (9, 1), (7, 1)]


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = make_engine()
    for name in ("cold", "again"):
        engine.submit(make_request(name, 8))
        results = run_to_end(engine)
    assert cached_tokens_of(results, "again") == 4 and results[0].prefill_tokens == 4


def test_no_more_than_max_num_seqs_sequences_run() -> None:
    engine = make_engine(limits=SchedulerLimits(max_num_seqs=3))
    engine.submit(replace(make_request("two", 4, max_tokens=3), choices=2))
    engine.submit(replace(make_request("two more", 4, max_tokens=3, start=20), choices=2))
    engine.submit(make_request("one", 4, max_tokens=3, start=40))
    while engine.has_work:
        engine.step(0.0)
        assert engine.load.running <= 3


def test_a_request_is_refused_if_the_queue_is_full() -> None:
    engine = make_engine(limits=SchedulerLimits(max_num_seqs=1, queue_limit=2))
    for name in ("a", "b"):
        engine.submit(make_request(name, 4))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(make_request("c", 4))
    engine.step(0.0)
    engine.submit(make_request("c", 4))


def test_a_request_that_can_never_run_is_refused() -> None:
    engine = make_engine(4)
    with pytest.raises(RequestTooLarge, match="expected at most 16"):
        engine.submit(make_request("s", 15, max_tokens=2))
    engine.submit(make_request("s", 15, max_tokens=1))
    assert len(run_to_end(engine)) == 1


def test_the_youngest_sequence_is_preempted_and_still_gets_its_complete_answer() -> None:
    roomy, tight = make_engine(64), make_engine(9)
    for engine in (roomy, tight):
        engine.submit(make_request("old", 12, max_tokens=12))
        engine.submit(make_request("young", 12, max_tokens=12, start=100))
    expected, results = run_to_end(roomy), run_to_end(tight)
    assert tight.load.preemptions_total > 0 and roomy.load.preemptions_total == 0
    for name in ("old", "young"):
        assert answer_of(results, name) == answer_of(expected, name)
    halfway = results[: len(results) // 2]
    assert len(answer_of(halfway, "old")) > len(answer_of(halfway, "young"))
    assert tight.cache.available_blocks == 9


@pytest.mark.parametrize(("prompt_tokens", "is_begun"), [(12, True), (16, False)])
def test_a_prompt_is_begun_only_if_all_of_it_fits(prompt_tokens: int, is_begun: bool) -> None:
    engine = make_engine(20, limits=SchedulerLimits(max_num_batched_tokens=8))
    engine.submit(make_request("long", 64, max_tokens=9))
    while not engine.step(0.0).tokens:
        pass
    engine.step(0.0)  # now 3 of 20 blocks are left: a chunk of 7 tokens fits in any case
    engine.submit(make_request("next", prompt_tokens, max_tokens=2, start=200))
    engine.step(0.0)
    assert engine.load.waiting == (not is_begun)
    assert len(answer_of(run_to_end(engine), "next")) == 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_load_finishes_with_complete_answers_and_complete_events(data: st.DataObject) -> None:
    limits = SchedulerLimits(
        max_num_seqs=data.draw(st.integers(2, 5)), max_num_batched_tokens=data.draw(st.integers(1, 20))
    )
    engine = make_engine(
        data.draw(st.integers(4, 14)), num_cpu_blocks=data.draw(st.sampled_from([0, 3])), limits=limits
    )
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
    results += run_to_end(engine)
    for result in results:
        assert result.prefill_tokens + result.decode_sequences <= limits.max_num_batched_tokens
        fold.apply(result.events)
    assert {key: len(answer_of(results, *key)) for key in expected} == expected
    finished = [(t.request_id, t.choice) for result in results for t in result.tokens if t.finish_reason]
    assert sorted(finished) == sorted(expected)
    assert engine.cache.available_blocks == engine.cache.num_blocks
    stats = engine.cache.stats()
    assert sum(fold.copies.values()) == stats.cached_blocks + stats.cpu_blocks
