"""The simulated engines make the schedules that vLLM's own scheduler made (0.33.0): recorded ones, without vLLM."""

from pathlib import Path

import pytest

from tests.simulator.recorded_schedules import Schedule, schedule_stepwise, serve_in_virtual_time

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "schedules").glob("*.json.gz"))


def check_like_vllm(recorded: Schedule) -> None:
    """Compare each step, if requests are scheduled in order of arrival, and how each request was served."""
    if not any(one.priority for one in recorded.requests):
        steps, hits = schedule_stepwise(recorded)
        for number, (ours, theirs) in enumerate(zip(steps, recorded.steps, strict=False)):
            assert ours.computed == theirs.computed and ours.preempted == sorted(theirs.preempted), f"step {number}"
        assert len(steps) == len(recorded.steps)
        assert hits == [one.hit for one in recorded.requests]
    assert serve_in_virtual_time(recorded) == (recorded.services, recorded.preemptions)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_it_schedules_as_vllm_did(path: Path) -> None:
    check_like_vllm(Schedule.read(path))


def test_the_recordings_cover_chunks_hits_preemptions_and_priorities() -> None:
    recorded = [Schedule.read(path) for path in RECORDINGS]
    assert sum(one.preemptions for one in recorded) > 20
    assert any(one.priority for schedule in recorded for one in schedule.requests if schedule.preemptions)
    assert any(
        len(one.prompt) > schedule.limits.max_num_batched_tokens for schedule in recorded for one in schedule.requests
    )
    assert sum(one.hit > 0 for schedule in recorded for one in schedule.requests) > 50
