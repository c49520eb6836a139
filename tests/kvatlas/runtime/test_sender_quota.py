"""One sender's flood is left out, but no other sender's messages."""

from kvatlas.runtime.sender_quota import BURST, MOST_SENDERS, PER_S, FairShare


def test_a_flood_is_cut_to_a_burst_and_a_rate() -> None:
    share = FairShare()
    assert sum(share.admit("w0", 1_000.0) for _ in range(10_000)) == BURST
    every_s = 1 / 1024
    assert sum(share.admit("w0", 1_000.0 + step * every_s) for step in range(1, 10 * 1024 + 1)) == 10 * PER_S


def test_a_sender_that_keeps_to_its_share_loses_nothing_beside_one_that_floods() -> None:
    share = FairShare()
    for step in range(1_000):
        now_s = step / PER_S
        for _ in range(50):
            share.admit("flood", now_s)
        assert share.admit("w0", now_s)


def test_a_sender_that_was_silent_has_its_burst_again() -> None:
    share = FairShare(burst=3, per_s=1)
    assert [share.admit("w0", 0.0) for _ in range(4)] == [True, True, True, False]
    assert [share.admit("w0", 10.0) for _ in range(4)] == [True, True, True, False]


def test_it_remembers_a_bounded_number_of_senders() -> None:
    share = FairShare()
    for number in range(3 * MOST_SENDERS):
        assert share.admit(number, 0.0)
    assert len(share._taken) <= MOST_SENDERS
