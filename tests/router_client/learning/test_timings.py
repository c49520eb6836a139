"""The measured times of an answer."""

import pytest

from router_client import AnswerClock, Timings


def test_the_clock_measures_an_answer_from_its_parts() -> None:
    now = [0]

    def answer(*parts_ms: float) -> AnswerClock:
        now[0] = 0
        clock = AnswerClock(lambda: now[0])
        for ms in parts_ms:
            now[0] = int(ms * 1e6)
            clock.part()
        return clock

    assert answer().timings(5) == Timings()
    assert answer(50).timings(1) == Timings(50_000)
    assert answer(50).timings(20) == Timings()  # in one piece: it is unknown when it began
    assert answer(50, 58, 66, 74, 82).timings(5) == Timings(50_000, 8_000)
    assert answer(50, 58, 90, 98, 106).timings(5) == Timings(50_000, 8_000)  # another request's prefill came in between
    assert answer(50, 66, 74, 82, 90).timings(6) == Timings(50_000, 8_000)  # two parts came as one
    assert answer(50, 62, 74, 86).timings(10) == Timings(50_000, 4_000)  # three tokens per part
    assert answer(50, 58, 66, 74).timings(5) == Timings(50_000, 8_000)  # the end of the text is a token, but not a part
    assert answer(50, 66, 66, 82, 82).timings(5) == Timings(50_000, 8_000)  # two parts at a time, in two reads
    assert answer(50, 58).timings(2) == Timings(50_000)  # a single gap does not show what else came in between
    assert answer(50, 58, 66, 74).timings(4_000) == Timings(50_000)  # no engine makes so many tokens at a time


def test_parts_without_content_are_none() -> None:
    """If role, finish reason, usage and [DONE] counted, which come within a millisecond, an answer of 3 tokens would give 100
    us per token."""
    now = [0]
    clock = AnswerClock(lambda: now[0])
    for ms, parts in ((40, 0), (50, 1), (58, 1), (66, 1), (66.1, 0), (66.2, 0)):
        now[0] = int(ms * 1e6)
        clock.part(parts)
    assert clock.timings(4) == Timings(50_000, 8_000)


class LateLoop:
    """A loop that is late once, by a given time."""

    def __init__(self, at_ms: float, by_ms: float) -> None:
        self._at_ns, self._by_ns = at_ms * 1e6, int(by_ms * 1e6)

    def watch(self, watcher: object) -> None:
        """Do nothing: it is always watched."""

    def most_ns(self, start_ns: int, end_ns: int) -> int:
        return self._by_ns if start_ns <= self._at_ns < end_ns else 0


def test_a_time_in_which_the_loop_was_late_is_left_out() -> None:
    def timings(late: LateLoop | None) -> Timings:
        now = [0]
        clock = AnswerClock(lambda: now[0], late)
        for ms in (50, 58, 66, 74, 90):
            now[0] = int(ms * 1e6)
            clock.part()
        return clock.timings(5)

    assert timings(None) == Timings(50_000, 8_000)
    assert timings(LateLoop(20, by_ms=4)) == Timings(50_000, 8_000)
    assert timings(LateLoop(20, by_ms=6)) == Timings(None, 8_000)
    assert timings(LateLoop(60, by_ms=3)) == Timings(50_000, 8_000)
    assert timings(LateLoop(60, by_ms=5)) == Timings(50_000)
    assert timings(LateLoop(95, by_ms=50)) == Timings(50_000, 8_000)


@pytest.mark.parametrize(("held_ns", "is_measured"), [(500_000, True), (5_000_000, False)])
def test_a_receiver_that_takes_nothing_says_nothing_of_the_engine(held_ns: int, is_measured: bool) -> None:
    now = [0]
    clock = AnswerClock(lambda: now[0])
    for _ in range(6):
        now[0] += 10_000_000
        clock.part()
        clock.hold(held_ns)
    timings = clock.timings(6)
    assert timings.ttft_us == 10_000
    assert (timings.tpot_us is not None) == is_measured
