import pytest

from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Heartbeat, Liveness
from kvatlas_indexer.liveness.failure_detector import (
    BLIND_FOR_S,
    LOST_AFTER_S,
    RETIRE_AFTER_S,
    FailureDetector,
    Retirement,
)


def endpoint(worker_id: str) -> EngineEndpoint:
    return EngineEndpoint(id=worker_id, kind=EngineKind.MOCK, model_id="m", tokenizer_id="t")


def beat(worker_id: str, incarnation: int = 1, state: EngineState = EngineState.UP) -> Heartbeat:
    return Heartbeat(
        worker_id=worker_id, incarnation=incarnation, acked_seq=0, state=state, endpoint=endpoint(worker_id)
    )


def known(worker_id: str, liveness: Liveness = Liveness.ALIVE) -> FleetRecord:
    return FleetRecord(endpoint=endpoint(worker_id), state=EngineState.UP, liveness=liveness, incarnation=1)


class Fleet:
    """A detector and a clock that the test sets; `hear` does what NATS' callback does for an owned worker."""

    def __init__(self) -> None:
        self.detector = FailureDetector()
        self.now_s = 0.0

    def hear(self, *worker_ids: str, incarnation: int = 1, state: EngineState = EngineState.UP) -> bool:
        urgent = False
        for worker_id in worker_ids:
            self.detector.record_pulse(worker_id, self.now_s)
            urgent |= self.detector.hear(beat(worker_id, incarnation, state), self.now_s, int(self.now_s * 1e6))
        return urgent

    def run(self, seconds: float, *alive: str) -> list[Retirement]:
        """Let time pass, second by second, with heartbeats from `alive` only."""
        named: dict[str, Retirement] = {}
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(self.now_s + 1, end_s)
            self.hear(*alive)
            named.update({retirement.worker_id: retirement for retirement in self.detector.detect(self.now_s)})
        return list(named.values())


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_new_worker_is_urgent_and_then_written_each_round(fleet: Fleet) -> None:
    assert fleet.hear("a")
    assert fleet.detector.take_changed()["a"].routable
    assert fleet.detector.take_changed() == {}
    fleet.now_s = 1
    assert not fleet.hear("a")
    assert fleet.detector.take_changed()["a"].heard_us == 1_000_000


@pytest.mark.parametrize("state", [EngineState.DOWN, EngineState.ASLEEP, EngineState.DRAINING])
def test_a_change_of_the_engines_state_is_urgent(fleet: Fleet, state: EngineState) -> None:
    fleet.hear("a")
    assert fleet.hear("a", state=state)
    assert not fleet.detector.take_changed()["a"].routable


def test_a_worker_is_lost_after_five_seconds_without_a_heartbeat_and_back_with_the_next(fleet: Fleet) -> None:
    fleet.hear("a")
    fleet.run(LOST_AFTER_S)
    assert fleet.detector.workers == {"a": Liveness.ALIVE}
    fleet.detector.take_changed()
    fleet.run(1)
    assert fleet.detector.take_changed()["a"].liveness is Liveness.LOST
    assert fleet.detector.lost == 1
    assert fleet.hear("a")
    assert fleet.detector.take_changed()["a"].liveness is Liveness.ALIVE


def test_a_worker_to_retire_after_sixty_seconds_is_named_until_forgotten(fleet: Fleet) -> None:
    fleet.hear("a", "b")
    assert fleet.run(RETIRE_AFTER_S, "b") == []
    expected = [Retirement("a", endpoint("a").pool_id)]
    assert fleet.run(1, "b") == expected
    assert fleet.run(1, "b") == expected
    fleet.detector.forget(lambda worker_id: worker_id == "a")
    assert fleet.run(1, "b") == []


def test_a_new_owner_restarts_the_clocks(fleet: Fleet) -> None:
    fleet.now_s = 500
    fleet.detector.adopt({"a": known("a"), "b": known("b", Liveness.LOST)}, fleet.now_s)
    assert fleet.run(LOST_AFTER_S) == []
    assert fleet.detector.workers == {"a": Liveness.ALIVE, "b": Liveness.LOST}
    assert fleet.detector.take_changed() == {}
    retired = fleet.run(RETIRE_AFTER_S)
    assert {retirement.worker_id for retirement in retired} == {"a", "b"}


def test_adopting_does_not_overwrite_what_was_heard(fleet: Fleet) -> None:
    fleet.hear("a")
    fleet.detector.adopt({"a": known("a", Liveness.LOST)}, fleet.now_s)
    assert fleet.detector.workers == {"a": Liveness.ALIVE}


def test_no_worker_is_retired_while_most_of_the_fleet_vanishes_at_once(fleet: Fleet) -> None:
    everyone = [f"w{i}" for i in range(10)]
    fleet.hear(*everyone)
    assert fleet.run(300, *everyone[:3]) == []
    assert fleet.detector.held_back == 7
    assert set(fleet.detector.workers.values()) == {Liveness.ALIVE, Liveness.LOST}


def test_workers_of_other_replicas_count_as_the_fleet(fleet: Fleet) -> None:
    owned = [f"w{i}" for i in range(4)]
    fleet.hear(*owned)
    for second in range(70):
        fleet.now_s = float(second)
        for other in range(10):
            fleet.detector.record_pulse(f"other-{other}", fleet.now_s)
    assert {retirement.worker_id for retirement in fleet.detector.detect(fleet.now_s)} == set(owned)


def test_workers_that_vanish_one_by_one_are_retired(fleet: Fleet) -> None:
    everyone = [f"w{i}" for i in range(6)]
    fleet.hear(*everyone)
    retired = set()
    for gone in range(1, 6):
        for retirement in fleet.run(90, *everyone[gone:]):
            retired.add(retirement.worker_id)
    assert retired == set(everyone[:5])


def test_a_fleet_that_is_switched_off_is_retired_in_the_end(fleet: Fleet) -> None:
    everyone = [f"w{i}" for i in range(10)]
    fleet.hear(*everyone)
    assert fleet.run(BLIND_FOR_S - 1) == []
    assert {retirement.worker_id for retirement in fleet.run(2)} == set(everyone)


def test_heartbeats_of_a_lower_incarnation_do_not_count_while_the_higher_one_is_alive(fleet: Fleet) -> None:
    fleet.hear("a", incarnation=9)
    fleet.detector.take_changed()
    assert not fleet.hear("a", incarnation=3, state=EngineState.DOWN)
    assert fleet.detector.take_changed() == {}
    fleet.now_s = LOST_AFTER_S + 1
    assert fleet.hear("a", incarnation=3, state=EngineState.DOWN)


def test_records_that_could_not_be_written_are_returned_again(fleet: Fleet) -> None:
    fleet.hear("a")
    changed = fleet.detector.take_changed()
    fleet.detector.restore_changed(changed)
    fleet.detector.record_applied(["a"], {"a": "00-1-2-01"}, 7)
    assert fleet.detector.take_changed()["a"].trace == "00-1-2-01"


def test_forgotten_workers_are_not_judged(fleet: Fleet) -> None:
    fleet.hear("a")
    fleet.detector.forget(lambda _: True)
    assert fleet.detector.workers == {} and fleet.detector.take_changed() == {}


def test_a_worker_with_blocks_in_the_index_but_no_heartbeat_is_retired(fleet: Fleet) -> None:
    """A late message arrived after it was retired, or its fleet record was lost."""
    fleet.hear("a", "b")
    fleet.detector.watch({"a", "ghost"}, fleet.now_s)
    assert fleet.run(RETIRE_AFTER_S, "a", "b") == []
    fleet.detector.watch({"a", "ghost"}, fleet.now_s)
    assert fleet.run(1, "a", "b") == [Retirement("ghost", None)]
    fleet.detector.watch({"a"}, fleet.now_s)
    assert fleet.run(1, "a", "b") == []


def test_a_watched_worker_that_is_heard_in_time_is_alive(fleet: Fleet) -> None:
    fleet.detector.watch({"a"}, fleet.now_s)
    fleet.run(RETIRE_AFTER_S - 1)
    assert fleet.run(5, "a") == []
    assert fleet.detector.workers == {"a": Liveness.ALIVE}
