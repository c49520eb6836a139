"""Generated workloads are repeatable, share system prompts, and continue with the engine's answers."""

import pytest
from pydantic import ValidationError

from kvatlas_simulator.workload import Conversation, WorkloadSettings, generate_workload

SMALL = WorkloadSettings(seed=3, sessions=20, system_prompts=2, system_prompt_tokens=(30, 40), user_tokens=(2, 6))


def test_equal_settings_give_equal_workloads() -> None:
    assert generate_workload(SMALL) == generate_workload(SMALL)
    assert generate_workload(SMALL) != generate_workload(SMALL.model_copy(update={"seed": 4}))


def test_sessions_share_system_prompts_and_arrive_in_order() -> None:
    sessions = generate_workload(SMALL).sessions
    assert len({session.system_prompt for session in sessions}) == 2
    arrivals = [session.arrival_us for session in sessions]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0 and arrivals[-1] > 0


def test_values_stay_within_their_ranges() -> None:
    for session in generate_workload(SMALL).sessions:
        assert 30 <= len(session.system_prompt) <= 40 and 2 <= len(session.turns) <= 6
        for turn in session.turns:
            assert 2 <= len(turn.token_ids) <= 6 and 16 <= turn.max_tokens <= 128
            assert all(256 <= token < 32_000 for token in turn.token_ids)


def test_each_turn_continues_the_one_before_and_its_answer() -> None:
    session = generate_workload(SMALL).sessions[0]
    conversation = Conversation(session)
    before: list[int] = list(session.system_prompt)
    for index, user in enumerate(session.turns):
        turn = conversation.next_turn()
        assert turn is not None and turn.turn_index == index and turn.max_tokens == user.max_tokens
        assert turn.prompt == [*before, *user.token_ids]
        conversation.add_answer([900 + index])
        before = [*turn.prompt, 900 + index]
    assert conversation.next_turn() is None
    with pytest.raises(ValueError, match="has all its"):
        conversation.add_answer([1])


def test_the_totals_of_a_workload_are_the_sums_over_its_turns() -> None:
    workload = generate_workload(SMALL)
    requests = tokens = 0
    for session in workload.sessions:
        conversation = Conversation(session)
        while (turn := conversation.next_turn()) is not None:
            requests += 1
            tokens += len(turn.prompt)
            conversation.add_answer(range(turn.max_tokens))
    assert (workload.requests, workload.prompt_tokens) == (requests, tokens)


def test_a_descending_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="turns is 5 to 2; expected the smaller number first"):
        WorkloadSettings(turns=(5, 2))
