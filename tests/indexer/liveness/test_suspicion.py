from itertools import pairwise

import pytest

from kvatlas.index.protocol import WorkerRecord
from kvatlas_indexer.liveness.suspicion import (
    LONGEST_PATIENCE_S,
    OOM_PATIENCE_S,
    PATIENCE_S,
    Doubt,
    DoubtJudge,
    SnapshotRequest,
    doubt_of,
)


def record(incarnation: int = 5, seq: int = 10, **flags: object) -> WorkerRecord:
    return WorkerRecord("w", incarnation, seq, 3, **flags)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "heard", "doubt"),
    [
        (record(), {5: 10}, None),
        (record(), {5: 9}, None),  # acknowledged later than applied
        (record(), {5: 11}, Doubt.BEHIND),
        (record(), {6: 0}, Doubt.BEHIND),
        (record(), {5: 10, 6: -1}, None),  # a new incarnation that waits for its grant
        (record(), {4: 99, 5: 10}, None),  # an older publisher is still alive
        (record(), {4: 99}, Doubt.FOREIGN),
        (None, {5: 0}, Doubt.UNKNOWN),
        (None, {5: -1}, None),
        (record(bad=True), {5: 10}, Doubt.BAD),
        (record(closed=True), {5: 10}, Doubt.BAD),
        (record(want=(5, 12)), {5: 10}, Doubt.GAP),
        (record(want=(6, 0)), {5: 10}, Doubt.GAP),
        (record(want=(5, 9)), {5: 10}, None),
    ],
)
def test_each_kind_of_doubt(known: WorkerRecord | None, heard: dict[int, int], doubt: Doubt | None) -> None:
    assert doubt_of(known, heard) is doubt


class ClockedJudge:
    """A judge with a clock that the test sets."""

    def __init__(self) -> None:
        self.judge = DoubtJudge()
        self.now_s = 1_000.0
        self.at_end = True

    def hear(self, incarnation: int, acked_seq: int) -> None:
        self.judge.hear("w", incarnation, acked_seq, self.now_s)

    def after(self, seconds: float, known: WorkerRecord | None) -> list[SnapshotRequest]:
        self.now_s += seconds
        records = {"w": known} if known is not None else {}
        return self.judge.judge(records, lambda _: self.at_end, self.now_s)


@pytest.fixture
def clocked() -> ClockedJudge:
    return ClockedJudge()


def test_a_worker_without_heartbeats_is_not_judged(clocked: ClockedJudge) -> None:
    assert clocked.after(0, record(bad=True)) == clocked.after(100, record(bad=True)) == []


def test_after_two_seconds_without_progress_a_snapshot_above_the_incarnation_is_requested(
    clocked: ClockedJudge,
) -> None:
    clocked.hear(5, 11)
    assert clocked.after(0, record()) == []
    assert clocked.judge.doubts == {"w": Doubt.BEHIND}
    assert clocked.after(PATIENCE_S - 0.1, record()) == []
    assert clocked.after(0.1, record()) == [SnapshotRequest("w", 5, Doubt.BEHIND)]


def test_progress_restarts_the_wait_and_catching_up_ends_the_doubt(clocked: ClockedJudge) -> None:
    clocked.hear(5, 20)
    assert clocked.after(0, record(seq=10)) == []
    assert clocked.after(1.5, record(seq=15)) == []
    assert clocked.after(1.5, record(seq=15)) == []
    assert clocked.after(0.1, record(seq=20)) == []
    assert clocked.judge.doubts == {}


def test_no_snapshot_is_requested_while_the_partition_is_not_read_to_its_end(clocked: ClockedJudge) -> None:
    clocked.hear(5, 20)
    clocked.at_end = False
    clocked.after(0, record())
    assert clocked.after(30, record()) == []
    clocked.at_end = True
    assert clocked.after(PATIENCE_S - 0.1, record()) == []
    assert len(clocked.after(0.1, record())) == 1


def test_requests_back_off(clocked: ClockedJudge) -> None:
    clocked.hear(5, 20)
    clocked.after(0, record())
    requested_s = []
    for _ in range(600):
        clocked.hear(5, 20)
        if clocked.after(0.1, record()):
            requested_s.append(clocked.now_s)
    pauses = [round(b - a, 1) for a, b in pairwise(requested_s)]
    assert pauses == pytest.approx([4.0, 8.0, 16.0, 16.0], abs=0.11)
    assert max(pauses) <= LONGEST_PATIENCE_S + 0.11


def test_a_worker_without_room_is_waited_for_longer(clocked: ClockedJudge) -> None:
    full = record(bad=True, oom=True, closed=True)
    clocked.hear(5, 10)
    clocked.after(0, full)
    assert clocked.after(OOM_PATIENCE_S - 0.1, full) == []
    assert len(clocked.after(0.1, full)) == 1


def test_the_request_names_the_highest_incarnation_that_has_published(clocked: ClockedJudge) -> None:
    clocked.hear(5, 20)
    clocked.hear(8, -1)
    known = record(incarnation=6, want=(7, 3))
    clocked.after(0, known)
    assert clocked.after(PATIENCE_S, known)[0].above == 7


def test_an_unknown_worker_is_asked_above_the_incarnation_that_it_reports(clocked: ClockedJudge) -> None:
    clocked.hear(9, 4)
    clocked.after(0, None)
    assert clocked.after(PATIENCE_S, None) == [SnapshotRequest("w", 9, Doubt.UNKNOWN)]


def test_a_silent_incarnation_is_forgotten(clocked: ClockedJudge) -> None:
    clocked.hear(6, 3)
    clocked.after(61, None)
    clocked.hear(5, 10)
    assert clocked.after(0, record()) == []
    assert clocked.judge.doubts == {}


def test_a_publisher_below_the_record_is_doubted_when_the_records_own_is_silent(clocked: ClockedJudge) -> None:
    """It lost its state and its clock was set back; the record's incarnation was heard until just now."""
    clocked.hear(5, 10)
    for _ in range(5):
        clocked.now_s += 1
        clocked.hear(4, 99)
        assert clocked.after(0, record()) == []
    clocked.now_s += 1
    clocked.hear(4, 99)
    clocked.after(0, record())
    assert clocked.after(PATIENCE_S, record()) == [SnapshotRequest("w", 5, Doubt.FOREIGN)]


def test_a_forgotten_worker_is_not_judged(clocked: ClockedJudge) -> None:
    clocked.hear(5, 20)
    clocked.after(0, record())
    clocked.judge.forget(lambda worker_id: worker_id == "w")
    assert clocked.after(10, record()) == []
    assert clocked.judge.doubts == {}


def test_a_snapshot_of_a_bad_worker_is_requested_however_busy_its_engine_is(clocked: ClockedJudge) -> None:
    clocked.at_end = False
    requests = []
    for second in range(4):
        clocked.hear(5, 10 + second)
        requests += clocked.after(1, record(seq=10 + second, bad=True))
    assert requests == [SnapshotRequest("w", 5, Doubt.BAD)]


def test_a_bad_worker_whose_publisher_is_already_above_is_waited_for(clocked: ClockedJudge) -> None:
    clocked.at_end = False
    for _ in range(10):
        clocked.hear(6, 0)
        assert clocked.after(1, record(bad=True)) == []
