"""Gaps and restarts of a feed, detected from seqs and payloads alone."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.errors import InvalidValue
from kvatlas_publishers.feed.continuity import (
    COMPARED_PAYLOADS,
    REMEMBERED_PAYLOADS,
    REPLAY_TRIES,
    Batch,
    Continuity,
    Step,
)


def payloads(first: int, last: int, process: int = 0) -> list[Batch]:
    return [(seq, f"{process}:{seq}".encode()) for seq in range(first, last + 1)]


def at(last: int, *, can_replay: bool = True) -> Continuity:
    """The continuity of a feed taken from 0 up to `last`."""
    feed = Continuity(can_replay=can_replay)
    for seq, payload in payloads(0, last):
        assert feed.offer(seq, payload) == Step(take=[(seq, payload)])
    return feed


def test_a_batch_in_order_is_taken() -> None:
    assert at(5).last_seq == 5


def test_a_duplicate_is_known_by_its_payload() -> None:
    feed = at(5)
    assert feed.offer(*payloads(3, 3)[0]) == Step()
    assert (feed.last_seq, feed.counters.duplicates) == (5, 1)


def test_a_seq_that_goes_back_to_zero_with_another_payload_is_a_restart() -> None:
    feed = at(5)
    step = feed.offer(0, b"1:0")
    assert step.empty and step.take == [(0, b"1:0")] and step.ask_from is None
    assert (feed.last_seq, feed.counters.restarts) == (0, 1)


def test_a_restart_seen_late_asks_for_the_new_process_from_seq_0() -> None:
    feed = at(5)
    step = feed.offer(2, b"1:2")
    assert step.empty and not step.take and step.ask_from == 0
    assert feed.take_replay(payloads(0, 2, 1), True).take == payloads(0, 2, 1)


def test_a_gap_is_filled_from_the_replay_of_the_same_process() -> None:
    feed = at(5)
    step = feed.offer(9, b"0:9")
    assert not step.empty and not step.take and step.ask_from == 0
    step = feed.take_replay(payloads(0, 11), True)
    assert not step.empty and step.take == payloads(6, 11)
    assert feed.offer(10, b"0:10") == Step()  # the feed delivers it too


def test_a_replay_starts_at_the_last_few_seqs_taken() -> None:
    feed = at(100)
    assert feed.offer(103, b"0:103").ask_from == 100 - COMPARED_PAYLOADS + 1


def test_a_gap_may_be_filled_without_the_end_marker() -> None:
    feed = at(5)
    feed.offer(7, b"0:7")
    assert feed.take_replay(payloads(5, 7), False).take == payloads(6, 7)


@pytest.mark.parametrize(
    ("answers", "complete"),
    [
        (payloads(5, 6) + payloads(8, 8), True),  # a gap
        (payloads(5, 6) + payloads(8, 8), False),
        (payloads(5, 6), False),  # does not reach the received message
        (payloads(7, 8), False),  # nor what is held
        ([], False),
    ],
)
def test_an_incomplete_replay_is_asked_again_and_given_up_after_a_few_tries(
    answers: list[Batch], complete: bool
) -> None:
    feed = at(5)
    feed.offer(8, b"0:8")
    taken: list[Batch] = []
    for _ in range(REPLAY_TRIES - 1):
        step = feed.take_replay(answers, complete)
        taken += step.take
        assert not step.empty and step.ask_from == 0
    assert taken == [one for one in answers if one[0] == 6]  # batches in order are kept
    step = feed.take_replay(answers, complete)
    assert step.empty and step.take[-1] == (8, b"0:8") and step.why
    assert (feed.counters.gaps_filled, feed.counters.replays_failed) == (0, REPLAY_TRIES)


def test_several_incomplete_replays_may_fill_a_gap() -> None:
    feed = at(5)
    feed.offer(9, b"0:9")
    assert feed.take_replay([*payloads(4, 6), *payloads(8, 9)], False).take == payloads(6, 6)
    assert feed.take_replay(payloads(5, 7), False).take == payloads(7, 7)
    step = feed.take_replay(payloads(5, 10), True)
    assert step == Step(take=payloads(8, 10)) and feed.counters.started_over == 0


def test_a_gap_longer_than_the_replay_starts_over_with_what_leads_up_to_the_message() -> None:
    feed = at(5)
    feed.offer(8, b"0:8")
    step = feed.take_replay(payloads(7, 9), True)
    assert step.empty and step.take == payloads(7, 9) and step.why and step.ask_from is None


def test_an_engine_with_an_empty_replay_buffer_is_followed_all_the_same() -> None:
    feed = at(5)
    feed.offer(8, b"0:8")
    assert feed.take_replay([], True).take == [(8, b"0:8")]


@pytest.mark.parametrize("answers", [payloads(5, 6), payloads(5, 9)])
def test_a_message_that_a_complete_replay_does_not_have_is_not_the_engines(answers: list[Batch]) -> None:
    """It is a foreign message, or a queued one of an earlier process: replay was requested after it arrived."""
    feed = at(5)
    feed.offer(8, b"another's")
    step = feed.take_replay(answers, True)
    assert not step.empty and step.take == answers[1:] and step.why
    joining = Continuity()
    joining.offer(8, b"another's")
    assert joining.take_replay(answers, True).take == answers


def test_after_a_lost_connection_replay_is_asked_for_the_process() -> None:
    assert at(5).reconnect() == Step(ask_from=0)
    step = at(5, can_replay=False).reconnect()
    assert step.empty and not step.take and step.ask_from is None
    assert Continuity(can_replay=False).reconnect() == Step()


def test_a_gap_in_another_process_asks_again_from_seq_0() -> None:
    feed = at(5)
    feed.offer(8, b"1:8")
    step = feed.take_replay(payloads(0, 8, 1), True)
    assert step.empty and not step.take and step.ask_from == 0
    assert feed.take_replay(payloads(0, 8, 1), True).take == payloads(0, 8, 1)


def test_another_process_whose_next_seq_followed_ours_is_revealed_by_an_older_payload() -> None:
    feed = at(5)
    feed.offer(6, b"1:6")  # in order, by chance
    assert feed.probe().ask_from == 0
    step = feed.take_replay(payloads(0, 6, 1), True)
    assert step.empty and step.ask_from == 0
    assert feed.take_replay(payloads(0, 6, 1), True).take == payloads(0, 6, 1)


def test_without_a_replay_socket_a_gap_starts_over() -> None:
    feed = at(5, can_replay=False)
    step = feed.offer(7, b"0:7")
    assert step.empty and step.take == [(7, b"0:7")] and step.ask_from is None
    assert feed.probe() == Step()


def test_a_late_joiner_takes_everything_from_the_replay() -> None:
    feed = Continuity()
    assert feed.offer(4, b"0:4").ask_from == 0
    step = feed.take_replay(payloads(0, 5), True)
    assert not step.empty and step.take == payloads(0, 5) and not step.why


def test_a_late_joiner_takes_the_last_part_without_a_gap() -> None:
    feed = Continuity()
    feed.offer(40, b"0:40")
    for _ in range(REPLAY_TRIES - 1):
        assert feed.take_replay(payloads(30, 33) + payloads(36, 41), True).ask_from == 0
    step = feed.take_replay(payloads(30, 33) + payloads(36, 41), True)
    assert step.take == payloads(36, 41) and "seq 36" in step.why


def test_a_late_joiner_without_a_replay_takes_the_message() -> None:
    feed = Continuity()
    feed.offer(4, b"0:4")
    for _ in range(REPLAY_TRIES - 1):
        assert feed.take_replay([], False).ask_from == 0
    assert feed.take_replay([], False).take == [(4, b"0:4")]
    silent = Continuity(can_replay=False)
    assert silent.offer(4, b"0:4").take == [(4, b"0:4")]


def test_a_probe_finds_a_lost_last_batch() -> None:
    feed = at(5)
    feed.probe()
    assert feed.take_replay(payloads(0, 7), True) == Step(take=payloads(6, 7))
    feed.probe()
    step = feed.take_replay(payloads(0, 7), True)
    assert not step.take and not step.empty


def test_a_probe_before_any_message_takes_everything_from_the_replay() -> None:
    feed = Continuity()
    assert feed.probe().ask_from == 0
    assert feed.take_replay([], True) == Step()
    assert feed.take_replay(payloads(0, 3), True).take == payloads(0, 3)


def test_a_probe_that_finds_an_empty_buffer_sees_a_restart() -> None:
    feed = at(5)
    feed.probe()
    step = feed.take_replay([], True)
    assert step.empty and step.ask_from == 0
    assert feed.take_replay([], True) == Step() and feed.last_seq is None


def test_incomplete_probes_are_tolerated_a_few_times() -> None:
    feed = at(5)
    for _ in range(REPLAY_TRIES - 1):
        feed.probe()
        assert not feed.take_replay([], False).empty
    feed.probe()
    step = feed.take_replay([], False)
    assert step.empty and feed.last_seq is None and feed.counters.replays_failed == REPLAY_TRIES


def test_a_message_in_order_resets_the_count_of_failed_probes() -> None:
    feed = at(5)
    for seq in range(6, 20):
        feed.probe()
        assert not feed.take_replay([], False).empty
        feed.offer(seq, f"0:{seq}".encode())
    assert feed.counters.started_over == 0


def test_a_restart_empties_and_asks_from_seq_0() -> None:
    step = at(5).restart()
    assert step.empty and step.ask_from == 0


def test_a_loaded_position_resumes_the_same_process() -> None:
    feed = Continuity.load(at(500).dump())
    assert feed.resume().ask_from == 500 - COMPARED_PAYLOADS + 1
    assert feed.take_replay(payloads(480, 503), True) == Step(take=payloads(501, 503))


def test_a_loaded_position_of_another_process_starts_empty() -> None:
    feed = Continuity.load(at(5).dump())
    feed.resume()
    step = feed.take_replay(payloads(0, 9, 1), True)
    assert step.empty and step.ask_from == 0
    assert feed.take_replay(payloads(0, 9, 1), True).take == payloads(0, 9, 1)


def test_a_loaded_position_that_cant_be_verified_starts_empty() -> None:
    feed = Continuity.load(at(5).dump(), can_replay=False)
    assert feed.resume().empty
    empty = Continuity.load(Continuity().dump())
    assert empty.resume() == Step(ask_from=0)


def test_bytes_that_are_no_position_are_refused() -> None:
    dumped = at(5).dump()
    for torn in (b"", b"\xc1", dumped[:-1], b"\x93\x05\x00\x90", b"\x01", b"\x93\x01\x00\x91\x01"):
        with pytest.raises(InvalidValue):
            Continuity.load(torn)


def test_a_seq_that_no_message_has_is_refused() -> None:
    with pytest.raises(InvalidValue):
        Continuity().offer((1 << 64) - 1, b"")


def test_remembered_payloads_are_bounded() -> None:
    feed = at(REMEMBERED_PAYLOADS + 10)
    assert feed.offer(10, b"0:10").empty  # too old to be distinguished from a restart
    assert feed.last_seq is None
    feed = at(REMEMBERED_PAYLOADS + 10)
    assert not feed.offer(11, b"0:11").empty and feed.counters.duplicates == 1
    assert len(feed.dump()) < 16_384


# ---------------------------------------------------------------- against an engine that restarts and a feed that loses


@dataclass
class Engine:
    """An engine whose seq starts at 0 in each process, with a buffer of the last batches."""

    process: int = 0
    sent: list[Batch] = field(default_factory=list)
    buffer: int = 6

    def send(self) -> Batch:
        batch = (len(self.sent), f"{self.process}:{len(self.sent)}".encode())
        self.sent.append(batch)
        return batch

    def replay(self, first: int) -> list[Batch]:
        return [batch for batch in self.sent[-self.buffer :] if batch[0] >= first]


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(10, 120))
def test_held_batches_are_always_an_unbroken_part_of_one_process(chance: random.Random, moves: int) -> None:
    """After a complete probe, the held batches are the last ones that the engine sent, without a gap."""
    engine, feed = Engine(), Continuity()
    held: list[Batch] = []
    queue: list[Batch] = []

    def do(step: Step, loss: float) -> None:
        while True:
            if step.empty:
                held.clear()
            held.extend(step.take)
            if step.ask_from is None:
                return
            answers = engine.replay(step.ask_from)
            whole = chance.random() >= loss
            step = feed.take_replay(answers if whole else [one for one in answers if chance.random() < 0.7], whole)

    for _ in range(moves):
        move = chance.random()
        if move < 0.5:
            batch = engine.send()
            queue += [batch] if chance.random() < 0.85 else []
        elif move < 0.85 and queue:
            do(feed.offer(*queue.pop(0)), 0.3)
        elif move < 0.9:
            engine = Engine(engine.process + 1, buffer=engine.buffer)
            if chance.random() < 0.5:
                queue.clear()
        elif move < 0.95 and feed.last_seq is not None:
            feed = Continuity.load(feed.dump())
            do(feed.resume(), 0.3)
        elif not queue:
            do(feed.probe(), 0.3)
        seqs = [seq for seq, _ in held]
        assert seqs == list(range(seqs[0], seqs[-1] + 1)) if seqs else True
        assert feed.last_seq == (seqs[-1] if seqs else None)
    while queue:
        do(feed.offer(*queue.pop(0)), 0.0)
    do(feed.probe(), 0.0)
    if engine.sent:
        # The last few payloads are compared, so they are from this process; those older than its buffer can't be compared.
        compared = held[-min(COMPARED_PAYLOADS, engine.buffer) :]
        assert held[-1] == engine.sent[-1]
        assert all(batch in engine.sent for batch in compared)
    else:
        assert not held


def test_a_clean_feed_counts_no_gap_and_no_restart() -> None:
    feed = at(10)
    assert (feed.counters.gaps, feed.counters.restarts, feed.counters.started_over) == (0, 0, 0)
