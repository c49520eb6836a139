"""Live replays of the same requests over real servers."""

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.lab.generated_requests import generate
from kvatlas_simulator.lab.replay import replay
from kvatlas_simulator.lab.study import Point, Study, compare_live
from kvatlas_simulator.lab.summary import Figures

pytestmark = pytest.mark.anyio


async def test_a_live_replay_finds_about_as_much_cached_as_one_in_virtual_time() -> None:
    study = Study(generate("chat", 0, 40), ("kvatlas",), [Point(2, 60_000, 4.0)], seeds=1)
    (live,) = await compare_live(study, scale=8.0)
    outcome = replay(study.workload, "kvatlas", study.points[0].to_fleet(study), 0, speed=4.0)
    # only 40 requests, on a machine that also does other work: `make lab STUDY=live` compares them closely
    assert live.summary.mean.hit_rate > 0.7 * Figures.of(outcome, study.objective).hit_rate > 0.3


async def test_only_policies_that_use_the_servers_are_replayed_live() -> None:
    study = Study(generate("chat", 0, 20), ("oracle",), [Point(2, 60_000)], seeds=1)
    with pytest.raises(InvalidValue, match="policy oracle can't be replayed live; expected kvatlas, "):
        await compare_live(study, scale=1.0)


async def test_a_live_replay_takes_no_delay_of_events() -> None:
    study = Study(generate("chat", 0, 20), ("kvatlas",), [Point(2, 60_000, event_delay_ms=500.0)], seeds=1)
    with pytest.raises(InvalidValue, match="delay and loss of events in a live replay come from its servers"):
        await compare_live(study, scale=1.0)
