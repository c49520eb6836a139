"""Subjects and the worker in them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.bus.subjects import (
    alive_subject,
    control_subject,
    events_subject,
    is_inbox,
    partition_events,
    partition_of,
    worker_of,
)
from kvatlas.errors import InvalidValue
from tests.kvatlas.strategies import worker_ids


@given(worker_ids)
def test_a_worker_has_one_events_subject(worker_id: str) -> None:
    subject = events_subject(worker_id, 64)
    assert worker_of(subject) == (partition_of(worker_id, 64), worker_id)
    (filter_subject,) = partition_events(partition_of(worker_id, 64))
    assert subject.startswith(filter_subject.removesuffix("*"))


@given(worker_ids, st.integers(1, 200), st.lists(st.integers(1, 200), max_size=3))
def test_a_partition_hears_its_workers_however_their_publishers_count(
    worker_id: str, partitions: int, others: list[int]
) -> None:
    filters = partition_events(partition_of(worker_id, partitions), partitions, others)
    assert len(filters) == len(set(filters))
    for count in (partitions, *others):
        assert events_subject(worker_id, count).rpartition(".")[0] + ".*" in filters


@pytest.mark.parametrize("subject", ["", "kvatlas.events.1", "kvatlas.events.x.w", "kvatlas.alive.1.w", "a.b.1.w.z"])
def test_other_subjects_are_refused(subject: str) -> None:
    with pytest.raises(InvalidValue, match="subject"):
        worker_of(subject)


@pytest.mark.parametrize("worker_id", ["a.b", "*", ">", ""])
def test_no_worker_id_can_widen_a_subject(worker_id: str) -> None:
    for subject in (alive_subject, control_subject, lambda w: events_subject(w, 64)):
        with pytest.raises(InvalidValue):
            subject(worker_id)


def test_answers_go_to_inboxes_alone() -> None:
    assert is_inbox("_INBOX.chat.x1")
    for subject in ("", "$JS.API.STREAM.DELETE.KVATLAS_EVENTS", "kvatlas.events.1.w", "_INBOXES.x", "x._INBOX.y"):
        assert not is_inbox(subject)
