"""Ejection, half-open tries and readmission, without servers; and two routers over a real store."""

import pytest

from kvatlas.outliers import OutlierChange, OutlierRecord, OutlierStore, Verdict
from kvatlas.store.connection import Store
from kvatlas_router.outliers.monitor import OutlierMonitor
from kvatlas_router.outliers.pool_outliers import EJECT_S, UNREACHABLE_S, Avoided, PoolOutliers
from kvatlas_router.outliers.retry_budget import RetryBudget

WORKERS = frozenset({"a", "b", "c", "d"})
POOL = "0011223344556677"


def fail(outliers: PoolOutliers, worker_id: str, times: int, now: float = 0.0) -> list[float]:
    return [outliers.record_bad(worker_id, now) for _ in range(times)]


def test_a_worker_is_ejected_at_its_third_failure_of_a_few_answers() -> None:
    outliers = PoolOutliers()
    assert fail(outliers, "a", 3) == [0.0, 0.0, EJECT_S]
    assert outliers.avoid(WORKERS, 0.0) == Avoided(failing=frozenset({"a"}))


def test_some_failures_among_many_answers_eject_nobody() -> None:
    outliers = PoolOutliers()
    for _ in range(20):
        outliers.record_good("a", 0.0)
    assert not any(fail(outliers, "a", 6)) and fail(outliers, "a", 1) == [EJECT_S]


def test_a_request_that_fails_everywhere_says_nothing_about_any_worker() -> None:
    outliers = PoolOutliers()
    fail(outliers, "b", 2)
    for _ in range(20):
        assert all(fail(outliers, worker_id, 1) == [0.0] for worker_id in ("a", "b", "c", "d"))


def test_refusals_are_doubtful_of_a_worker_that_refuses_far_more_than_the_others() -> None:
    outliers = PoolOutliers()
    for worker_id in WORKERS:
        outliers.record_good(worker_id, 0.0)
    assert [outliers.record_refused("a", 0.0) for _ in range(4)] == [False, False, True, True]
    for worker_id in ("b", "c", "d"):  # one client's mistakes, wherever they go
        for _ in range(4):
            outliers.record_refused(worker_id, 0.0)
    assert not outliers.record_refused("a", 0.0)
    assert not outliers.has_suspects(0.0)


def test_refusals_among_many_answers_and_old_ones_are_not_doubtful() -> None:
    outliers = PoolOutliers()
    for _ in range(20):
        outliers.record_good("a", 0.0)
    outliers.record_good("b", 0.0)
    assert not any(outliers.record_refused("a", 0.0) for _ in range(5))
    assert not any(outliers.record_refused("b", 30.0 * number) for number in range(20))


def test_an_ejected_worker_s_refusal_is_doubtful() -> None:
    outliers = PoolOutliers()
    fail(outliers, "a", 3)
    later = 600.0
    outliers.record_sent("a", later)
    assert outliers.record_refused("a", later)
    assert outliers.ejected(later).keys() == {"a"}


def test_failures_fade() -> None:
    outliers = PoolOutliers()
    assert not any(outliers.record_bad("a", 30.0 * number) for number in range(20))


def test_never_more_than_half_of_the_candidates_are_avoided_for_failures() -> None:
    outliers = PoolOutliers()
    record = OutlierRecord(0, 9, 30.0, 1, "")
    outliers.update(dict.fromkeys(WORKERS, record), "me", 0.0)
    assert len(outliers.ejected(0.0)) == 4
    assert len(outliers.avoid(WORKERS, 0.0).failing) == 2
    assert not outliers.avoid({"a"}, 0.0).failing & {"a"}


def test_only_the_router_that_may_tries_again_and_with_one_request_at_a_time() -> None:
    outliers = PoolOutliers()
    fail(outliers, "a", 3)
    after = EJECT_S + 0.1
    assert outliers.avoid(WORKERS, after).failing == {"a"}
    (change,) = outliers.take_changes(after, used=True)
    assert (change.worker_id, change.verdict, change.times) == ("a", Verdict.EJECT, 0)
    (change,) = outliers.take_changes(after, used=True)
    assert change.verdict is Verdict.PROBE
    outliers.put_back([change], after)  # the store is away: nobody else is asked either
    assert outliers.avoid(WORKERS, after).failing == set()
    outliers.record_sent("a", after)
    assert outliers.avoid(WORKERS, after).failing == {"a"}
    outliers.record_unknown("a")
    assert outliers.avoid(WORKERS, after).failing == set()
    assert outliers.record_bad("a", after) == 2 * EJECT_S
    later = after + 2 * EJECT_S + 0.1
    assert outliers.record_complete("a", later) and not outliers.ejected(later)
    assert not outliers.has_suspects(later)


def test_a_worker_that_does_not_answer_is_avoided_at_once_and_for_a_short_time() -> None:
    outliers = PoolOutliers()
    outliers.record_bad("a", 0.0, unreachable=True)
    assert outliers.avoid({"a"}, 1.0).failing == {"a"}
    assert not outliers.has_suspects(UNREACHABLE_S + 0.1)


def test_a_worker_that_asks_for_a_pause_gets_it() -> None:
    outliers = PoolOutliers()
    outliers.rest("a", 5, 0.0)
    outliers.rest("b", 3_600, 0.0)
    assert outliers.avoid({"a"}, 1.0) == Avoided(frozenset({"a", "b"}), frozenset(), 4.0)
    assert outliers.avoid(WORKERS, 29.0).resting == {"b"} and not outliers.has_suspects(31.0)


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
async def test_a_pool_s_bad_day_takes_nothing_from_another_s_budget(store: Store) -> None:
    async def no_members(_: str) -> set[str]:
        return set()

    monitor = OutlierMonitor(OutlierStore(store), "router", no_members)
    while monitor.retry_budget("bad").take():
        pass
    assert monitor.retry_budget("good").take()


@pytest.mark.anyio
async def test_routers_count_together_eject_once_and_one_of_them_tries_again(store: Store) -> None:
    shared = OutlierStore(store)
    records = await shared.exchange(POOL, "r1", [OutlierChange("a", 1, 2)])
    records = await shared.exchange(POOL, "r2", [OutlierChange("a", 0, 2)])
    assert records["a"].bad == pytest.approx(4, abs=0.1) and records["a"].left_s is None
    eject = OutlierChange("a", 0, 0, Verdict.EJECT, 0, 0.02)
    await shared.exchange(POOL, "r1", [eject])
    records = await shared.exchange(POOL, "r2", [eject])
    assert records["a"].times == 1 and records["a"].left_s is not None
    probe = OutlierChange("a", 0, 0, Verdict.PROBE)
    while (records := await shared.exchange(POOL, "r2", [probe]))["a"].prober == "":
        pass  # until the ejection is over
    assert records["a"].prober == "r2" and (await shared.exchange(POOL, "r1", [probe]))["a"].prober == "r2"
    again = await shared.exchange(POOL, "r2", [OutlierChange("a", 0, 1, Verdict.EJECT, 1, 5.0)])
    assert again["a"].times == 2 and 4 < (again["a"].left_s or 0) <= 5 and again["a"].prober == ""
    ended = await shared.exchange(POOL, "r2", [OutlierChange("a", 1, 0, Verdict.READMIT, 2)])
    assert (ended["a"].left_s, ended["a"].times) == (None, 2) and ended["a"].bad == 0


@pytest.mark.anyio
async def test_many_changes_go_in_calls_that_are_short(store: Store) -> None:
    changes = [OutlierChange(f"w{number}", 1, 1) for number in range(450)]
    assert len(await OutlierStore(store).exchange(POOL, "r1", changes)) == 450
