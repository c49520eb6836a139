"""Who sent an undecodable payload, and how often all held blocks are dropped because of one."""

from kvatlas_publishers.feed.undecodable import Distrust, UndecodableQueue


def test_the_next_message_shows_that_a_bad_payload_was_the_engines() -> None:
    aside = UndecodableQueue()
    aside.put(5, b"bad", 4)
    assert aside.take_before(6) == [(5, b"bad")]
    assert aside.take_before(7) == []


def test_a_foreign_payload_that_took_a_seq_is_dropped() -> None:
    aside = UndecodableQueue()
    aside.put(5, b"bad", 4)
    aside.put(5, b"worse", 4)
    assert aside.take_before(5) == []


def test_several_in_a_row_are_kept() -> None:
    aside = UndecodableQueue()
    aside.put(0, b"a", None)
    aside.put(1, b"b", None)
    assert aside.take_before(2) == [(0, b"a"), (1, b"b")]


def test_a_good_message_with_the_seq_of_the_second_keeps_the_first() -> None:
    aside = UndecodableQueue()
    aside.put(5, b"a", 4)
    aside.put(6, b"b", 4)
    assert aside.take_before(6) == [(5, b"a")]


def test_a_bad_payload_after_a_gap_is_left_to_the_replay() -> None:
    aside = UndecodableQueue()
    aside.put(9, b"a", 4)
    assert aside.take_before(10) == []


def test_a_bad_payload_before_a_gap_is_left_to_the_replay() -> None:
    aside = UndecodableQueue()
    aside.put(5, b"a", 4)
    assert aside.take_before(9) == []


def test_a_loss_drops_everything_held_while_there_is_ration_left() -> None:
    distrust = Distrust(burst=3, ration_s=10)
    assert [distrust.record_loss(0.0) for _ in range(2)] == [True, True]
    assert distrust.is_trusted(0.0)


def test_the_last_ration_ends_the_trust() -> None:
    distrust = Distrust(burst=2, ration_s=10)
    assert [distrust.record_loss(0.0) for _ in range(4)] == [True, True, False, False]
    assert not distrust.is_trusted(9.9)
    assert distrust.is_trusted(10.1)


def test_each_new_ration_is_spent_by_the_next_loss() -> None:
    distrust = Distrust(burst=2, ration_s=10)
    dropped = [distrust.record_loss(float(second)) for second in range(100)]
    assert sum(dropped) == 2 + 9
    assert not distrust.is_trusted(100.0) or distrust.record_loss(100.0)


def test_rare_losses_always_drop_everything_held() -> None:
    distrust = Distrust(burst=2, ration_s=10)
    assert all(distrust.record_loss(20.0 * nth) for nth in range(50))
