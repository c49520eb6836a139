"""Finds whose clock is wrong from the times that indexers write."""

from kvatlas.fleet.records import Liveness
from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.predictions.condition import RouterCondition
from kvatlas.predictions.store import StoredReport
from kvatlas_cli.doctor.clocks import indexers_ahead, judge_clocks
from kvatlas_cli.doctor.routers import router_clocks
from tests.kvatlas_cli.doctor.installation import fleet_record

NOW_US = 1_800_000_000_000_000
HOUR_US = 3_600_000_000


def test_an_indexer_whose_clock_is_wrong_is_named() -> None:
    records = {
        id: fleet_record(id, heard_us=NOW_US + us)
        for id, us in (("a", -200_000), ("b", -2 * HOUR_US), ("c", 30_000_000), ("gone", -9 * HOUR_US))
    }
    records["gone"] = records["gone"].model_copy(update={"liveness": Liveness.LOST})
    owners = {"a": "right", "b": "late", "c": "early", "gone": "right"}
    found = indexers_ahead(records, {"a", "b", "c"}, owners, NOW_US)
    assert found == {"late": -2 * HOUR_US, "early": 30_000_000}
    (wrong,) = judge_clocks(0, {}, found, {"r": 24 * HOUR_US})
    assert wrong.line.endswith(": indexer early +30.0 s, indexer late -2.0 h, router r +1.0 d")


def test_a_routers_report_that_arrives_late_is_no_clock_that_is_behind() -> None:
    ahead_us = {"late": -3_000_000, "behind": -60_000_000, "ahead": 2_000_000}
    reports = {
        name: StoredReport(AnswerReport(condition=RouterCondition(sent_us=NOW_US + us)), NOW_US)
        for name, us in ahead_us.items()
    }
    assert router_clocks(reports, 0) == {"behind": -60_000_000, "ahead": 2_000_000}
