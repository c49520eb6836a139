"""The choices of the last minutes."""

from router_client.decision.history import LAST, STEP_S, STEPS, DecisionHistory, PastDecision, Tally


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def decision(worker_id: str, cached_tokens: int = 60) -> PastDecision:
    return PastDecision(0, worker_id, "m", 100, cached_tokens, 5_000, "cost", "")


def test_choices_and_what_engines_found_add_up_by_worker() -> None:
    history = DecisionHistory(Clock())
    history.record(decision("a"), without_index=False)
    history.record(decision("a", 40), without_index=True)
    history.record(decision("b"), without_index=False)
    history.record_answer("a", 100, 64)
    assert history.by_worker() == {"a": Tally(2, 1, 200, 100, 100, 64), "b": Tally(1, 0, 100, 60)}
    assert [one.worker_id for one in history.last] == ["a", "a", "b"]


def test_old_choices_are_forgotten_and_memory_is_bounded() -> None:
    clock = Clock()
    history = DecisionHistory(clock)
    for step in range(3 * STEPS):
        clock.now_s = step * STEP_S
        history.record(decision(f"w{step}"), without_index=False)
    assert len(history.by_worker()) == STEPS and "w0" not in history.by_worker()
    assert history.by_step() == [1] * STEPS
    assert len(history.last) == LAST
    clock.now_s += 2 * STEP_S
    assert history.by_step() == [*[1] * (STEPS - 2), 0, 0] and len(history.by_worker()) == STEPS - 2
    clock.now_s += STEPS * STEP_S
    assert history.by_worker() == {} and sum(history.by_step()) == 0
