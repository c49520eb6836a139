"""Times measured of an answer."""

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
    assert answer(50).timings(20) == Timings()  # in one piece: when it began is not known
    assert answer(50, 58, 66, 74, 82).timings(5) == Timings(50_000, 8_000)
    assert answer(50, 58, 90, 98, 106).timings(5) == Timings(50_000, 8_000)  # a prefill of others came in between
    assert answer(50, 66, 74, 82, 90).timings(6) == Timings(50_000, 8_000)  # two parts came as one
    assert answer(50, 62, 74, 86).timings(10) == Timings(50_000, 4_000)  # three tokens a part
