"""Ejection, half-open attempts and readmission, without servers; and two routers over a real store."""

import pytest

from kvatlas.ejection import EjectionChange, EjectionRecord, EjectionStore, Verdict
from kvatlas.store.connection import Store
from kvatlas_router.ejection.monitor import EjectionMonitor
from kvatlas_router.ejection.pool_ejections import EJECT_S, UNREACHABLE_S, Avoided, PoolEjections
from kvatlas_router.ejection.retry_budget import RetryBudget, RetryBudgets

WORKERS = frozenset({"a", "b", "c", "d"})
POOL = "0011223344556677"


def fail(ejections: PoolEjections, worker_id: str, times: int, now: float = 0.0) -> list[float]:
    return [ejections.record_bad(worker_id, now) for _ in range(times)]


def test_a_worker_is_ejected_at_its_third_failure_of_a_few_answers() -> None:
    ejections = PoolEjections()
    assert fail(ejections, "a", 3) == [0.0, 0.0, EJECT_S]
    assert ejections.avoid(WORKERS, 0.0) == Avoided(failing=frozenset({"a"}))


def test_some_failures_among_many_answers_eject_nobody() -> None:
    ejections = PoolEjections()
    for _ in range(20):
        ejections.record_good("a", 0.0)
    assert not any(fail(ejections, "a", 6)) and fail(ejections, "a", 1) == [EJECT_S]


def test_a_request_that_fails_everywhere_says_nothing_about_any_worker() -> None:
    ejections = PoolEjections()
    fail(ejections, "b", 2)
    for _ in range(20):
        assert all(fail(ejections, worker_id, 1) == [0.0] for worker_id in ("a", "b", "c", "d"))


def test_refusals_are_doubtful_of_a_worker_that_refuses_far_more_than_the_others() -> None:
    ejections = PoolEjections()
    for worker_id in WORKERS:
        ejections.record_good(worker_id, 0.0)
    assert [ejections.record_refused("a", 0.0) for _ in range(4)] == [False, False, True, True]
    for worker_id in ("b", "c", "d"):  # one client's mistakes, wherever they go
        for _ in range(4):
            ejections.record_refused(worker_id, 0.0)
    assert not ejections.record_refused("a", 0.0)
    assert not ejections.has_suspects(0.0)


def test_refusals_among_many_answers_and_old_ones_are_not_doubtful() -> None:
    ejections = PoolEjections()
    for _ in range(20):
        ejections.record_good("a", 0.0)
    ejections.record_good("b", 0.0)
    assert not any(ejections.record_refused("a", 0.0) for _ in range(5))
    assert not any(ejections.record_refused("b", 30.0 * number) for number in range(20))


def test_an_ejected_worker_s_refusal_is_doubtful() -> None:
    ejections = PoolEjections()
    fail(ejections, "a", 3)
    later = 600.0
    ejections.record_sent("a", later)
    assert ejections.record_refused("a", later)
    assert ejections.ejected(later).keys() == {"a"}


def test_failures_fade() -> None:
    ejections = PoolEjections()
    assert not any(ejections.record_bad("a", 30.0 * number) for number in range(20))


def test_never_more_than_half_of_the_candidates_are_avoided_for_failures() -> None:
    ejections = PoolEjections()
    record = EjectionRecord(0, 9, 30.0, 1, "")
    ejections.update(dict.fromkeys(WORKERS, record), "me", 0.0)
    assert len(ejections.ejected(0.0)) == 4
    assert len(ejections.avoid(WORKERS, 0.0).failing) == 2
    assert not ejections.avoid({"a"}, 0.0).failing & {"a"}


def test_only_the_router_that_may_tries_again_and_with_one_request_at_a_time() -> None:
    ejections = PoolEjections()
    fail(ejections, "a", 3)
    after = EJECT_S + 0.1
    assert ejections.avoid(WORKERS, after).failing == {"a"}
    (change,) = ejections.take_changes(after, used=True)
    assert (change.worker_id, change.verdict, change.times) == ("a", Verdict.EJECT, 0)
    (change,) = ejections.take_changes(after, used=True)
    assert change.verdict is Verdict.PROBE
    ejections.put_back([change], after)  # the store is away, so no other router tries either
    assert ejections.avoid(WORKERS, after).failing == set()
    ejections.record_sent("a", after)
    assert ejections.avoid(WORKERS, after).failing == {"a"}
    ejections.record_unknown("a")
    assert ejections.avoid(WORKERS, after).failing == set()
    assert ejections.record_bad("a", after) == 2 * EJECT_S
    later = after + 2 * EJECT_S + 0.1
    assert ejections.record_complete("a", later) and not ejections.ejected(later)
    assert not ejections.has_suspects(later)


def test_a_worker_that_does_not_answer_is_avoided_at_once_and_for_a_short_time() -> None:
    ejections = PoolEjections()
    ejections.record_bad("a", 0.0, unreachable=True)
    assert ejections.avoid({"a"}, 1.0).failing == {"a"}
    assert not ejections.has_suspects(UNREACHABLE_S + 0.1)


def test_a_worker_that_asks_for_a_pause_gets_it() -> None:
    ejections = PoolEjections()
    ejections.rest("a", 5, 0.0)
    ejections.rest("b", 3_600, 0.0)
    assert ejections.avoid({"a"}, 1.0) == Avoided(frozenset({"a", "b"}), frozenset(), 4.0)
    assert ejections.avoid(WORKERS, 29.0).resting == {"b"} and not ejections.has_suspects(31.0)


def test_the_budget_allows_a_share_of_the_requests_and_some_more() -> None:
    now = 0.0
    budget = RetryBudget(share=0.2, reserve=5, clock=lambda: now)
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
    for _ in range(51):
        budget.record_request()
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    now = 4.1
    assert [budget.take() for _ in range(3)] == [True, True, False]


@pytest.mark.anyio
async def test_a_bad_day_of_a_pool_or_tenant_takes_nothing_from_another_s_budget(store: Store) -> None:
    async def no_members(_: str) -> set[str]:
        return set()

    monitor = EjectionMonitor(EjectionStore(store), "router", no_members)
    while monitor.retry_budget("bad", "a").take():
        pass
    assert monitor.retry_budget("good", "a").take()
    assert monitor.retry_budget("bad", "b").take()


def test_tenants_share_the_reserve_for_those_with_few_requests() -> None:
    budgets = RetryBudgets()
    for tenant in range(4):
        budget = budgets.of(str(tenant))
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
    for tenant in range(2_000):
        budget = budgets.of(str(tenant))
    assert [budget.take() for _ in range(3)] == [True] * 2 + [False]


@pytest.mark.anyio
async def test_routers_count_together_eject_once_and_one_of_them_tries_again(store: Store) -> None:
    shared = EjectionStore(store)
    records = await shared.exchange(POOL, "r1", [EjectionChange("a", 1, 2)])
    records = await shared.exchange(POOL, "r2", [EjectionChange("a", 0, 2)])
    assert records["a"].bad == pytest.approx(4, abs=0.1) and records["a"].left_s is None
    eject = EjectionChange("a", 0, 0, Verdict.EJECT, 0, 0.02)
    await shared.exchange(POOL, "r1", [eject])
    records = await shared.exchange(POOL, "r2", [eject])
    assert records["a"].times == 1 and records["a"].left_s is not None
    probe = EjectionChange("a", 0, 0, Verdict.PROBE)
    while (records := await shared.exchange(POOL, "r2", [probe]))["a"].prober == "":
        pass  # until the ejection is over
    assert records["a"].prober == "r2" and (await shared.exchange(POOL, "r1", [probe]))["a"].prober == "r2"
    again = await shared.exchange(POOL, "r2", [EjectionChange("a", 0, 1, Verdict.EJECT, 1, 5.0)])
    assert again["a"].times == 2 and 4 < (again["a"].left_s or 0) <= 5 and again["a"].prober == ""
    ended = await shared.exchange(POOL, "r2", [EjectionChange("a", 1, 0, Verdict.READMIT, 2)])
    assert (ended["a"].left_s, ended["a"].times) == (None, 2) and ended["a"].bad == 0


@pytest.mark.anyio
async def test_many_changes_go_in_calls_that_are_short(store: Store) -> None:
    changes = [EjectionChange(f"w{number}", 1, 1) for number in range(450)]
    assert len(await EjectionStore(store).exchange(POOL, "r1", changes)) == 450
