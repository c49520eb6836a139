"""When records of closed workers are deleted."""

from dataclasses import replace

from kvatlas.index.protocol import WorkerRecord
from kvatlas_indexer.cleanup.record_expiry import RecordExpiry

CLOSED = WorkerRecord("w", incarnation=5, seq=9, partition=0, closed=True)


def test_a_record_is_due_when_it_was_closed_for_the_given_time() -> None:
    expiry = RecordExpiry(100)
    expiry.update([CLOSED], 0)
    assert expiry.due(100) == []
    expiry.update([CLOSED], 60)
    assert expiry.due(101) == [("w", 5)]


def test_open_answering_and_loading_records_are_never_due() -> None:
    expiry = RecordExpiry(100)
    for kept in (replace(CLOSED, closed=False), replace(CLOSED, answering=True), replace(CLOSED, loading=True)):
        expiry.update([kept], 0)
        assert expiry.due(1_000) == []


def test_the_time_starts_again_with_another_incarnation_and_after_the_record_was_open() -> None:
    expiry = RecordExpiry(100)
    expiry.update([CLOSED], 0)
    expiry.update([replace(CLOSED, incarnation=6)], 90)
    assert expiry.due(150) == []
    expiry.update([], 160)
    expiry.update([replace(CLOSED, incarnation=6)], 170)
    assert expiry.due(200) == []
    assert expiry.due(271) == [("w", 6)]
