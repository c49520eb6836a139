import msgpack
import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.bus.admission import Admission, PoisonMessage, PoisonReason
from kvatlas.bus.subjects import FLEET, events_subject, partition_of
from kvatlas.bus.wire import INCARNATION, MAX_MESSAGE_BYTES, MESSAGE_VERSION, SCOPES, TS_US, WORKER_ID, encode
from kvatlas.events import Message, ScopeUse, SnapshotBegin, SnapshotEnd, Stored
from kvatlas.identity import Scope

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


def reason_of(payload: bytes, subject: str = SUBJECT, partition: int = PARTITION) -> PoisonReason:
    with pytest.raises(PoisonMessage) as poison:
        Admission(partition, PARTITIONS).admit(subject, payload)
    assert "\n" not in str(poison.value)
    return poison.value.reason


def test_a_valid_message_is_admitted_as_it_is() -> None:
    message = Admission(PARTITION, PARTITIONS).admit(SUBJECT, GOOD)
    assert message is not None and message[WORKER_ID:TS_US] == [WORKER, 7, 3]


def test_messages_of_publishers_with_another_number_of_partitions_are_taken_by_one_partition() -> None:
    for count in (PARTITIONS, 50):
        subject = events_subject(WORKER, count)
        taken = [Admission(number, PARTITIONS, publishers=[50]).admit(subject, GOOD) for number in range(PARTITIONS)]
        assert [number for number, message in enumerate(taken) if message is not None] == [PARTITION]
    assert reason_of(GOOD, events_subject(WORKER, 50)) is PoisonReason.WRONG_PARTITION


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"garbage", GOOD[:-3], msgpack.packb({"a": 1}), msgpack.packb([1])])
def test_bytes_that_are_not_a_message_are_malformed(payload: bytes) -> None:
    assert reason_of(payload) is PoisonReason.MALFORMED


def test_another_version_has_its_own_reason() -> None:
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[MESSAGE_VERSION] = 5
    assert reason_of(msgpack.packb(raw)) is PoisonReason.VERSION


def test_a_message_of_another_fleet_is_poison_and_one_without_a_fleet_is_not() -> None:
    admission = Admission(PARTITION, PARTITIONS, fleet_id="00000000000a")
    for headers in (None, {}, {"traceparent": "x"}, {FLEET: "00000000000a"}):
        assert admission.admit(SUBJECT, GOOD, headers) is not None
    line = "fleet 00000000000b, this is fleet 00000000000a; give each fleet its own NATS"
    with pytest.raises(PoisonMessage, match=line) as poison:
        admission.admit(SUBJECT, GOOD, {FLEET: "00000000000b"})
    assert poison.value.reason is PoisonReason.FLEET
    assert Admission(PARTITION, PARTITIONS).admit(SUBJECT, GOOD, {FLEET: "00000000000b"}) is not None


def test_ten_megabytes_are_oversized() -> None:
    assert reason_of(b"\x00" * 10_000_000) is PoisonReason.OVERSIZED
    assert MAX_MESSAGE_BYTES < 10_000_000


def test_a_scope_whose_id_does_not_match_its_names_is_poison() -> None:
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[SCOPES] = {SCOPE.scope_id: ["other", "tokenizer", None, "default", 16, 100]}
    assert reason_of(msgpack.packb(raw)) is PoisonReason.SCOPE


def test_a_scope_is_checked_again_when_its_names_change() -> None:
    admission = Admission(PARTITION, PARTITIONS)
    admission.admit(SUBJECT, GOOD)
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[SCOPES][SCOPE.scope_id][0] = "other"
    with pytest.raises(PoisonMessage, match="scope id"):
        admission.admit(SUBJECT, msgpack.packb(raw))


@pytest.mark.parametrize(("place", "value"), [(4, 16.0), (4, 1 << 32), (5, 100.0), (5, 5_000_000_000)])
def test_a_number_that_only_equals_the_checked_one_is_poison(place: int, value: float) -> None:
    """It would be packed into 32 bits for the store."""
    admission = Admission(PARTITION, PARTITIONS)
    admission.admit(SUBJECT, GOOD)
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[SCOPES][SCOPE.scope_id][place] = value
    with pytest.raises(PoisonMessage, match="block"):
        admission.admit(SUBJECT, msgpack.packb(raw))


def test_an_incarnation_that_no_publisher_could_go_above_is_poison() -> None:
    raw = msgpack.unpackb(GOOD, strict_map_key=False)
    raw[INCARNATION] = (1 << 64) - 1
    assert reason_of(msgpack.packb(raw)) is PoisonReason.INCARNATION


def test_a_message_on_another_workers_subject_is_poison() -> None:
    other = f"kvatlas.events.{PARTITION}.worker-2"
    assert reason_of(GOOD, other) is PoisonReason.WRONG_SUBJECT


def test_a_message_in_another_partition_is_poison() -> None:
    wrong = (PARTITION + 1) % PARTITIONS
    assert reason_of(GOOD, f"kvatlas.events.{wrong}.{WORKER}", wrong) is PoisonReason.WRONG_PARTITION


def test_a_checked_subject_does_not_admit_another_worker() -> None:
    admission = Admission(PARTITION, PARTITIONS)
    admission.admit(SUBJECT, GOOD)
    other = encode(Message("worker-2", 1, 0, [SnapshotBegin(), SnapshotEnd(0, [0] * 15)], {}, 1))
    with pytest.raises(PoisonMessage) as poison:
        admission.admit(SUBJECT, other)
    assert poison.value.reason is PoisonReason.WRONG_SUBJECT
