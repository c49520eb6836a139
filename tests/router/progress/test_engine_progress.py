"""The state of one engine by its progress: the state in each case, and what holds whatever happens."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.progress.engine_progress import (
    BEGUN,
    CUT_S,
    LEAST_LEFT,
    PROBE_EVERY_S,
    TRIAL_EVERY_S,
    EngineProgress,
    Probe,
    State,
)
from kvatlas_router.progress.expected_times import Bounds

BOUNDS = Bounds(2.0, 4.0)
STEP_S = 0.1


@dataclass
class Seen:
    """An engine under a router that looks every STEP_S, and sends a probe whenever it should. `outcome`: that of probes."""

    engine: EngineProgress = field(default_factory=EngineProgress)
    now: float = 0.0
    outcome: Probe | None = None
    probes: int = 0

    def wait(self, seconds: float) -> State:
        for _ in range(round(seconds / STEP_S)):
            self.now += STEP_S
            self.engine.judge(self.now)
            if self.engine.wants_probe(self.now):
                self.engine.send_probe(self.now)
                self.probes += 1
                if self.outcome is not None:
                    self.engine.end_probe(self.outcome, self.now)
        return self.engine.state


def test_an_engine_without_work_is_alive_however_long_it_is_silent() -> None:
    seen = Seen()
    assert seen.wait(100) is State.ALIVE and seen.probes == 0


def test_an_engine_that_answers_nothing_is_suspected_then_stalled_then_probed_until_it_answers() -> None:
    seen = Seen()
    seen.engine.send("a", BOUNDS, seen.now)
    assert seen.wait(1.9) is State.ALIVE
    assert seen.wait(0.3) is State.SUSPECTED and not seen.engine.refuses(seen.now)
    assert seen.wait(2.3) in (State.STALLED, State.PROBING) and seen.engine.refuses(seen.now)
    assert seen.wait(30) is State.PROBING
    seen.engine.end_probe(Probe.ANSWERED, seen.now)
    assert seen.engine.judge(seen.now) is State.ALIVE and not seen.engine.refuses(seen.now)


def test_progress_on_another_request_keeps_it_alive_however_long_one_waits() -> None:
    seen = Seen()
    seen.engine.send("waits", BOUNDS, seen.now)
    seen.engine.send("streams", BOUNDS, seen.now)
    for _ in range(100):
        assert seen.wait(1.5) is State.ALIVE
        seen.engine.receive("streams", seen.now)
    assert seen.probes == 0


def test_counters_that_moved_are_progress_and_those_from_before_the_silence_are_none() -> None:
    seen = Seen()
    seen.wait(5)
    seen.engine.send("a", BOUNDS, seen.now)
    seen.wait(3)
    seen.engine.observe(4.9, seen.now)
    assert seen.engine.judge(seen.now) is State.SUSPECTED
    seen.engine.observe(seen.now - 0.5, seen.now)
    assert seen.engine.judge(seen.now) is State.ALIVE


def test_a_long_prompt_makes_the_others_wait_as_long_as_it_may_take() -> None:
    seen = Seen()
    seen.engine.send("long", Bounds(20.0, 40.0), seen.now)
    seen.engine.send("short", BOUNDS, seen.now)
    assert seen.wait(19) is State.ALIVE
    assert seen.wait(22) is not State.ALIVE


def test_requests_that_keep_coming_do_not_hide_that_none_is_answered() -> None:
    seen = Seen()
    for number in range(100):
        seen.engine.send(number, BOUNDS, seen.now)
        seen.wait(0.5)
        if seen.engine.is_stalled:
            break
    assert seen.now <= BOUNDS.suspect_s + BOUNDS.stall_s + 1


def test_answers_in_the_middle_may_pause_for_longer() -> None:
    seen = Seen()
    seen.engine.send("a", BOUNDS, seen.now)
    seen.engine.receive("a", seen.now)
    assert seen.wait(BEGUN.suspect_s - 0.2) is State.ALIVE
    assert seen.wait(BEGUN.stall_s) is not State.ALIVE


def test_clients_that_leave_lead_to_a_probe_and_to_nothing_if_it_is_answered() -> None:
    seen = Seen(outcome=Probe.ANSWERED)
    for number in range(200):
        seen.engine.send(number, BOUNDS, seen.now)
        seen.wait(0.2)
        seen.engine.leave(number, seen.now)
        seen.wait(0.1)
        assert not seen.engine.is_stalled
    assert 0 < seen.probes <= 200 * 0.3 / BOUNDS.suspect_s + 1


def test_a_few_clients_that_leave_say_nothing() -> None:
    seen = Seen()
    for number in range(LEAST_LEFT - 1):
        seen.engine.send(number, BOUNDS, seen.now)
        seen.engine.leave(number, seen.now)
    assert seen.wait(200) is State.ALIVE and seen.probes == 0


def test_an_engine_that_refuses_probes_is_tried_with_a_real_request() -> None:
    seen = Seen(outcome=Probe.UNFIT)
    seen.engine.send("a", BOUNDS, seen.now)
    assert seen.wait(5) is State.STALLED and seen.engine.refuses(seen.now)
    seen.wait(TRIAL_EVERY_S)
    assert not seen.engine.refuses(seen.now)
    seen.engine.send("trial", BOUNDS, seen.now)
    assert seen.engine.refuses(seen.now)
    seen.engine.receive("trial", seen.now)
    assert seen.engine.judge(seen.now) is State.ALIVE


def test_an_engine_that_fails_every_probe_stalls() -> None:
    seen = Seen(outcome=Probe.FAILED)
    seen.engine.send("a", BOUNDS, seen.now)
    assert seen.wait(5) is State.STALLED


def test_what_is_learned_meanwhile_counts_for_what_waits() -> None:
    seen = Seen()
    seen.engine.send("a", Bounds(15.0, 30.0), seen.now)
    seen.wait(3)
    seen.engine.renew({"a": BOUNDS})
    assert seen.wait(0.2) is State.SUSPECTED


def test_a_pause_of_the_router_is_no_silence_of_the_engine() -> None:
    seen = Seen()
    seen.engine.send("a", BOUNDS, seen.now)
    seen.wait(1.5)
    seen.now += 60
    seen.engine.skip(60, seen.now)
    assert seen.wait(0.3) is State.ALIVE
    assert seen.wait(0.5) is State.SUSPECTED


def test_what_is_stalled_for_long_is_lost() -> None:
    seen = Seen()
    seen.engine.send("a", BOUNDS, seen.now)
    seen.wait(5)
    assert not seen.engine.is_lost(seen.now)
    seen.wait(CUT_S + 1)
    assert seen.engine.is_lost(seen.now)


EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.floats(0.1, 6.0)),
    st.tuples(st.just("send"), st.sampled_from([BOUNDS, Bounds(1.0, 2.0), Bounds(8.0, 20.0)])),
    st.tuples(st.just("receive"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("observe"), st.floats(0.0, 3.0)),
    st.tuples(st.just("probe"), st.sampled_from([Probe.FAILED, Probe.UNFIT, None])),
    st.tuples(st.just("pause"), st.floats(0.5, 60.0)),
)


@given(st.lists(EVENTS, max_size=60))
def test_whatever_happens(events: list[tuple[str, object]]) -> None:
    """Compared with what was seen, in the rule's terms: an engine becomes stalled only after a silence of at least the
    shortest bounds while it had work, with a probe that was unanswered or refused; progress makes it alive at once; a stall is
    found in the end, and the engine returns by itself."""
    seen, number, open_keys, last_progress, paused = Seen(), 0, list[int](), 0.0, 0.0
    last_sent: float | None = None
    for name, value in events:
        was_stalled = seen.engine.is_stalled
        match name, value:
            case "wait", float(seconds):
                seen.wait(seconds)
            case "send", Bounds() as bounds:
                seen.engine.send(number, bounds, seen.now)
                open_keys.append(number)
                last_sent = seen.now if last_sent is None else last_sent
                number += 1
            case "receive", int(which) if open_keys:
                seen.engine.receive(open_keys[which % len(open_keys)], seen.now)
                last_progress = seen.now
                assert seen.engine.judge(seen.now) is State.ALIVE and not seen.engine.refuses(seen.now)
            case (("end" | "leave"), int(which)) if open_keys:
                getattr(seen.engine, name)(open_keys.pop(which % len(open_keys)), seen.now)
            case "observe", float(ago):
                seen.engine.observe(seen.now - ago, seen.now)
            case "probe", outcome:
                assert outcome is None or isinstance(outcome, Probe)
                seen.outcome = outcome
            case "pause", float(seconds):
                seen.now += seconds
                paused += seconds
                seen.engine.skip(seconds, seen.now)
        if seen.engine.is_stalled and not was_stalled:
            assert last_sent is not None
            assert seen.now - max(last_progress, last_sent) >= 2.0 - STEP_S  # the least of the bounds
            assert seen.probes > 0
    # it no longer answers anything: if it has work, that is found in time
    seen.outcome = None
    seen.engine.send("last", BOUNDS, seen.now)
    seen.wait(8.0 + 20.0 + 2 * PROBE_EVERY_S)
    assert seen.engine.is_stalled
    # it computes again: the next probe shows it
    seen.outcome = Probe.ANSWERED
    seen.engine.end_probe(Probe.FAILED, seen.now)
    seen.wait(TRIAL_EVERY_S + PROBE_EVERY_S)
    if not seen.engine.may_be_probed:
        # a real request shows it: its trial, if one is already there, or the next
        if seen.engine.refuses(seen.now):
            seen.engine.receive("last", seen.now)
        else:
            seen.engine.send("trial", BOUNDS, seen.now)
            seen.engine.receive("trial", seen.now)
    assert seen.engine.judge(seen.now) is State.ALIVE
