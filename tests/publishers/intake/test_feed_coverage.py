"""The verdict on the published share of an engine's reports, and its text for every reason and engine."""

import pytest

from kvatlas.fleet.records import MAX_DIAGNOSIS_TEXT, EngineKind
from kvatlas_publishers.intake.diagnosis_texts import Circumstances, text_of
from kvatlas_publishers.intake.feed_coverage import (
    HOLES,
    LEAST_TOLD,
    PERIOD_S,
    SERVED_TOKENS,
    SERVING_S,
    Intake,
    Reason,
    Serving,
    Taken,
)
from kvatlas_publishers.intake.feed_coverage import Verdict as IntakeVerdict

IDLE = Serving()


def verdict(
    intake: Intake, taken: Taken, now_s: float = 0.0, serving: Serving = IDLE, *, publishes: bool = False
) -> str:
    found = intake.judge(taken, serving, publishes=publishes, now_s=now_s)
    return "" if found.reason is None else found.reason.value


def left_out(told: int, out: int, reason: Reason = Reason.UNKNOWN_PARENT) -> Taken:
    return Taken(told, {reason: out})


@pytest.mark.parametrize(
    ("told", "out", "found"),
    [
        (40, 40, "unknown_parent"),
        (40, 36, "unknown_parent"),
        (40, 35, ""),
        (40, 0, ""),
        (LEAST_TOLD - 1, LEAST_TOLD - 1, ""),
    ],
)
def test_a_feed_is_left_out_if_less_than_a_tenth_of_it_counts(told: int, out: int, found: str) -> None:
    assert verdict(Intake(), left_out(told, out)) == found


def test_the_most_frequent_reason_is_named_with_its_share() -> None:
    intake = Intake()
    found = intake.judge(
        Taken(100, {Reason.UNINDEXABLE: 30, Reason.OTHER_BLOCK_SIZE: 65}), IDLE, publishes=True, now_s=0.0
    )
    assert found == IntakeVerdict(Reason.OTHER_BLOCK_SIZE, 100, 95, 65)
    assert found.share == 0.95


def test_a_feed_that_worked_for_long_and_does_not_any_more_is_seen() -> None:
    intake = Intake()
    assert verdict(intake, left_out(100_000, 0)) == ""
    for minute in range(1, 4):
        seen = verdict(intake, left_out(100_000 + 100 * minute, 100 * minute), minute * PERIOD_S, publishes=True)
    assert seen == "unknown_parent"


def test_an_idle_engine_keeps_its_verdict_and_a_healed_one_loses_it() -> None:
    intake = Intake()
    for minute in range(10):
        assert verdict(intake, left_out(40, 40), minute * PERIOD_S) == "unknown_parent"
    assert verdict(intake, left_out(50, 40), 10 * PERIOD_S, publishes=True) == ""


def test_an_engine_that_serves_requests_and_tells_nothing_is_seen() -> None:
    running, intake = Serving(running=True), Intake()
    found = [verdict(intake, Taken(), float(second), running) for second in range(int(SERVING_S) + 2)]
    assert found[:5] == [""] * 5 and found[-1] == "no_events"
    assert intake.verdict.share == 1.0
    assert verdict(intake, Taken(told=1), 20.0, running) == ""


def test_prompt_tokens_show_requests_that_are_over_between_two_looks() -> None:
    intake = Intake()
    assert verdict(intake, Taken(), 0.0, Serving(prompt_tokens=9e6)) == ""
    assert verdict(intake, Taken(), 1.0, Serving(prompt_tokens=9e6 + SERVED_TOKENS - 1)) == ""
    assert verdict(intake, Taken(), 2.0, Serving(prompt_tokens=3.0)) == "", "another process counts from 0"
    assert verdict(intake, Taken(), 3.0, Serving(prompt_tokens=3.0 + SERVED_TOKENS)) == "no_events"


def test_cached_prompts_store_nothing_and_are_no_finding() -> None:
    intake, running = Intake(), Serving(running=True)
    assert all(not verdict(intake, Taken(told=64), float(at), running, publishes=True) for at in range(60))


def test_holes_that_replay_does_not_fill_are_seen_if_they_come_again_and_again() -> None:
    intake = Intake()
    found = [verdict(intake, Taken(unfilled=at), 10.0 * at, publishes=True) for at in range(HOLES + 1)]
    assert found == ["", "", "", "holes"]
    assert verdict(intake, Taken(unfilled=HOLES), 2_000.0, publishes=True) == ""


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("engine", [EngineKind.VLLM, EngineKind.SGLANG, EngineKind.TENSORRT_LLM, EngineKind.OPEN])
@pytest.mark.parametrize("replay", [False, True])
def test_every_reason_has_a_cure_that_fits_a_heartbeat(reason: Reason, engine: EngineKind, replay: bool) -> None:
    where = Circumstances(engine, engine is not EngineKind.TENSORRT_LLM, replay, "x" * 160)
    seen, cure = text_of(IntakeVerdict(reason, 40, 40, 30), where)
    assert seen.startswith(("events arrive, but", "the engine serves requests, but nothing is published"))
    assert cure and max(len(seen), len(cure)) <= MAX_DIAGNOSIS_TEXT
    assert reason in (Reason.NO_EVENTS, Reason.HOLES) or "75 % of those left out" in seen


def test_a_late_join_has_a_cure_that_heals_without_a_replay_socket() -> None:
    _, cure = text_of(IntakeVerdict(Reason.UNKNOWN_PARENT, 9, 9, 9), Circumstances(EngineKind.VLLM, True, False))
    assert "set --replay-endpoint" in cure and "/reset_prefix_cache" in cure
    _, cure = text_of(IntakeVerdict(Reason.UNKNOWN_PARENT, 9, 9, 9), Circumstances(EngineKind.SGLANG, True, False))
    assert "/flush_cache" in cure
