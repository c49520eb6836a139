"""The engine: the tokens, events and duration of its steps; forks, aborts and resets."""

from dataclasses import replace

from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.cache.kv_events import BlocksStored, GpuCleared
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from tests.simulator.engine.engines import answer_of, cached_tokens_of, make_engine, make_request, run_to_end


def test_the_duration_of_a_step_follows_its_work() -> None:
    engine = make_engine()
    engine.submit(make_request("s", 12, max_tokens=2))
    prefill, decode = run_to_end(engine)
    assert prefill.ended_us - prefill.started_us == 12 * 10
    assert decode.started_us == prefill.ended_us
    assert decode.ended_us - decode.started_us == 1_000 + 100 + 13 * 1


def test_generated_tokens_become_blocks_except_the_last_one() -> None:
    engine = make_engine()
    engine.submit(make_request("first", 4, max_tokens=5))
    results = run_to_end(engine)
    prompt = (0, 1, 2, 3, *answer_of(results, "first"))
    assert len(prompt) == 9
    stored = [event for result in results for event in result.events if isinstance(event, BlocksStored)]
    assert [event.token_ids for event in stored] == [prompt[:4], prompt[4:8]]
    assert stored[1].parent_hash == stored[0].block_hashes[0]
    engine.submit(GenerationRequest("next turn", (*prompt, 77), 1))
    assert cached_tokens_of(run_to_end(engine), "next turn") == 8


def test_a_steps_events_come_with_that_step() -> None:
    engine = make_engine(limits=SchedulerLimits(max_num_batched_tokens=4))
    engine.submit(make_request("s", 8))
    step = engine.begin_step(0.0)
    result = engine.end_step(step)
    assert [type(event) for event in result.events] == [BlocksStored]
    (stored,) = result.events
    assert isinstance(stored, BlocksStored) and stored.token_ids == (0, 1, 2, 3)


def test_answers_depend_only_on_model_adapter_prompt_and_choice() -> None:
    def tokens(engine: EngineCore, request: GenerationRequest) -> list[int]:
        engine.submit(request)
        return answer_of(run_to_end(engine), request.request_id)

    base = make_request("a", 10, max_tokens=8)
    alone = tokens(make_engine(), base)
    busy = make_engine(limits=SchedulerLimits(max_num_batched_tokens=3))
    busy.submit(make_request("other", 30, max_tokens=9, start=50))
    assert tokens(busy, base) == alone
    assert tokens(make_engine(), replace(base, prompt=(*base.prompt[:-1], 99))) != alone
    assert tokens(make_engine(), replace(base, namespace=Namespace(adapter="lora"))) != alone


def test_the_answers_of_one_request_share_its_prompt_and_copy_the_partial_block() -> None:
    engine = make_engine()
    engine.submit(replace(make_request("s", 6, max_tokens=4), choices=3))
    results = run_to_end(engine)
    answers = [answer_of(results, "s", choice) for choice in range(3)]
    assert [len(each) for each in answers] == [4, 4, 4] and len({tuple(each) for each in answers}) == 3
    assert engine.cache.stats().copies == 2, "the last one to write has the block for itself"
    assert sum(result.prefill_tokens for result in results) == 6


def test_an_aborted_request_frees_its_blocks_even_within_a_step() -> None:
    engine = make_engine()
    engine.submit(make_request("aborted", 12, max_tokens=5))
    engine.submit(make_request("stays", 12, max_tokens=1, start=50))
    step = engine.begin_step(0.0)
    engine.abort("aborted")
    assert [token.request_id for token in engine.end_step(step).tokens] == ["stays"]
    assert not engine.has_work and engine.cache.available_blocks == 64
    engine.abort("aborted")


def test_swapping_in_adds_to_the_duration_of_a_step() -> None:
    engine = make_engine(4, num_cpu_blocks=8)
    engine.submit(make_request("a", 12))
    run_to_end(engine)
    engine.submit(make_request("b", 15, start=50))
    run_to_end(engine)
    engine.submit(make_request("a again", 12))
    (result,) = run_to_end(engine)
    assert result.swapped_in_blocks == 2
    assert result.ended_us - result.started_us == 4 * 10 + 2 * 7


def test_a_reset_waits_for_running_requests_or_preempts_them() -> None:
    engine = make_engine()
    engine.submit(make_request("s", 8, max_tokens=3))
    engine.step(0.0)
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(preempt_running=True)
    assert engine.take_events() == (GpuCleared(),)
    results = run_to_end(engine)
    assert results[0].prefill_tokens == 9 and len(answer_of(results, "s")) == 2
