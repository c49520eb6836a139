"""The doctor's first answer: whether a request would be served well now."""

from kvatlas.fleet.records import EngineState, Liveness, Role
from kvatlas_cli.doctor.finding import Finding, Level
from kvatlas_cli.doctor.service_answer import SILENT, judge_gone, judge_serving
from tests.kvatlas_cli.doctor.installation import fleet_record

UP = [fleet_record("w1"), fleet_record("w2")]


def answer(records: list, **facts: object) -> Finding:  # type: ignore[type-arg]
    given: dict = {"unusable": {}, "unindexed": {}, **facts}  # type: ignore[type-arg]
    (found,) = judge_serving({"model m": records}, **given)
    return found


def test_yes_if_engines_are_up_and_indexed() -> None:
    found = answer(UP)
    assert (
        found.level is Level.OK and found.line == "model m: would a request be served well now? Yes, by 2 of 2 engines"
    )


def test_no_if_all_drain() -> None:
    found = answer([fleet_record(id, state=EngineState.DRAINING) for id in ("w1", "w2")])
    assert found.level is Level.ERROR and found.line.endswith("No, because no engine can take it (w1, w2: draining)")


def test_a_worker_that_is_left_out_is_named_with_the_reason() -> None:
    lost = fleet_record("w3", liveness=Liveness.LOST)
    found = answer([*UP, lost], unusable={"w2": "its engine makes no progress"})
    assert found.level is Level.OK and "Yes, by 1 of 3 engines" in found.line
    assert "w2: its engine makes no progress" in found.line and "w3: lost" in found.line


def test_by_load_only_if_all_are_silent() -> None:
    """Like routers, which don't believe that all workers are silent at once."""
    lost = [fleet_record(id, liveness=Liveness.LOST) for id in ("w1", "w2")]
    found = answer(lost, unusable={"w1": SILENT})
    assert found.level is Level.WARNING and "By load only, because no engine's heartbeat arrives" in found.line
    assert "(w1, w2)" in found.line
    stalled = "its engine makes no progress"
    assert "w1" not in answer(lost, unusable={"w1": stalled}).line.partition("were up")[2]


def test_by_load_only_if_the_index_knows_none_of_them() -> None:
    found = answer(UP, unindexed={"w1": "the index is behind", "w2": "the index is behind"})
    assert found.level is Level.WARNING and found.line.endswith("By load only, because w1, w2: the index is behind")
    assert answer(UP, unindexed={"w1": "the index is behind"}).level is Level.OK
    assert answer(UP, obstacles=["no indexer is running"]).line.endswith("By load only, because no indexer is running")
    assert answer(UP, slow={"model m": "the store is late"}).line.endswith("By load only, because the store is late")


def test_no_if_one_role_is_missing() -> None:
    prefill = [fleet_record("w1", of_endpoint={"role": Role.PREFILL})]
    assert answer(prefill).line.endswith("No, because no decode worker can take it")


def test_no_if_all_workers_of_the_last_hour_are_gone() -> None:
    assert "none of its workers is left (w1)" in judge_gone("model m", ["w1"]).line
