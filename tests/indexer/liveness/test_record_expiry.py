"""When records of closed workers may go."""

from dataclasses import replace

from indexer.liveness.record_expiry import Forgetting
from kvatlas.index.protocol import WorkerRecord

CLOSED = WorkerRecord("w", incarnation=5, seq=9, partition=0, closed=True)


def test_a_record_goes_after_it_was_closed_for_so_long() -> None:
    forgetting = Forgetting(100)
    forgetting.see([CLOSED], 0)
    assert forgetting.due(100) == []
    forgetting.see([CLOSED], 60)
    assert forgetting.due(101) == [("w", 5)]


def test_open_answering_and_loading_ones_stay() -> None:
    forgetting = Forgetting(100)
    for kept in (replace(CLOSED, closed=False), replace(CLOSED, answering=True), replace(CLOSED, loading=True)):
        forgetting.see([kept], 0)
        assert forgetting.due(1_000) == []


def test_the_time_begins_anew_with_another_incarnation_and_after_it_was_open() -> None:
    forgetting = Forgetting(100)
    forgetting.see([CLOSED], 0)
    forgetting.see([replace(CLOSED, incarnation=6)], 90)
    assert forgetting.due(150) == []
    forgetting.see([], 160)
    forgetting.see([replace(CLOSED, incarnation=6)], 170)
    assert forgetting.due(200) == []
    assert forgetting.due(271) == [("w", 6)]
