import msgpack
import pytest

from indexer.partition.admission import Admission, Poison, Refused
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import events_subject
from kvatlas.bus.wire import MAX_MESSAGE_BYTES, encode
from kvatlas.events import Message, ScopeUse, SnapshotBegin, SnapshotEnd, Stored
from kvatlas.identity import Scope, partition_of

PARTITIONS = 64
SCOPE = Scope("model", "tokenizer")
WORKER = "worker-1"
PARTITION = partition_of(WORKER, PARTITIONS)
SUBJECT = events_subject(WORKER, PARTITIONS)
GOOD = encode(
    Message(
        WORKER,
        7,
        3,
        [Stored(SCOPE.scope_id, Tier.HBM, bytes(range(16)))],
        {SCOPE.scope_id: ScopeUse(SCOPE, 16, 100)},
        1,
    )
)


def reason_of(payload: bytes, subject: str = SUBJECT, partition: int = PARTITION) -> Poison:
    with pytest.raises(Refused) as refused:
        Admission(partition, PARTITIONS).admit(subject, payload)
    assert "\n" not in str(refused.value)
    return refused.value.reason


def test_a_good_message_comes_through_as_it_is() -> None:
    assert Admission(PARTITION, PARTITIONS).admit(SUBJECT, GOOD)[1:4] == [WORKER, 7, 3]


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"garbage", GOOD[:-3], msgpack.packb({"a": 1}), msgpack.packb([1])])
def test_bytes_that_are_no_message_are_malformed(payload: bytes) -> None:
    assert reason_of(payload) is Poison.MALFORMED


def test_another_version_is_told_apart() -> None:
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[0] = 2
    assert reason_of(msgpack.packb(raw)) is Poison.VERSION


def test_ten_megabytes_are_too_much() -> None:
    assert reason_of(b"\x00" * 10_000_000) is Poison.OVERSIZED
    assert MAX_MESSAGE_BYTES < 10_000_000


def test_a_scope_whose_id_is_not_that_of_its_text_is_refused() -> None:
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[5] = {SCOPE.scope_id: ["other", "tokenizer", None, "default", 16, 100]}
    assert reason_of(msgpack.packb(raw)) is Poison.SCOPE


def test_a_scope_is_checked_again_when_its_text_changes() -> None:
    admission = Admission(PARTITION, PARTITIONS)
    admission.admit(SUBJECT, GOOD)
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[5][SCOPE.scope_id][0] = "other"
    with pytest.raises(Refused, match="scope id"):
        admission.admit(SUBJECT, msgpack.packb(raw))


def test_a_worker_on_anothers_subject_is_refused() -> None:
    other = f"kvatlas.events.{PARTITION}.worker-2"
    assert reason_of(GOOD, other) is Poison.WRONG_SUBJECT


def test_a_worker_in_another_partition_is_refused() -> None:
    wrong = (PARTITION + 1) % PARTITIONS
    assert reason_of(GOOD, f"kvatlas.events.{wrong}.{WORKER}", wrong) is Poison.WRONG_PARTITION


def test_a_known_subject_does_not_let_another_worker_through() -> None:
    admission = Admission(PARTITION, PARTITIONS)
    admission.admit(SUBJECT, GOOD)
    other = encode(Message("worker-2", 1, 0, [SnapshotBegin(), SnapshotEnd(0, [0] * 15)], {}, 1))
    with pytest.raises(Refused) as refused:
        admission.admit(SUBJECT, other)
    assert refused.value.reason is Poison.WRONG_SUBJECT
