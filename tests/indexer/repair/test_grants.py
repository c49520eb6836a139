from kvatlas.bus.control import GrantRequest
from kvatlas.index.protocol import WorkerRecord
from kvatlas_indexer.repair.grants import GRANT_S, GrantBudget


def request(worker_id: str, snapshot_bytes: int, incarnation: int = 1) -> GrantRequest:
    return GrantRequest(worker_id=worker_id, incarnation=incarnation, snapshot_bytes=snapshot_bytes)


def test_snapshots_are_granted_up_to_the_limit() -> None:
    budget = GrantBudget(100)
    assert budget.answer(request("a", 60), 0).granted
    assert budget.answer(request("b", 40), 0).granted
    refused = budget.answer(request("c", 1), 0)
    assert not refused.granted and refused.retry_after_ms > 0
    assert budget.outstanding_bytes == 100


def test_a_snapshot_above_the_limit_is_granted_alone() -> None:
    budget = GrantBudget(100)
    assert budget.answer(request("a", 500), 0).granted
    assert not budget.answer(request("b", 1), 0).granted


def test_a_grant_ends_when_the_index_answers_with_its_incarnation() -> None:
    budget = GrantBudget(100)
    budget.answer(request("a", 100, incarnation=7), 0)
    budget.release("a", 6)
    assert not budget.answer(request("b", 100), 0).granted
    budget.release("a", 7)
    assert budget.answer(request("b", 100), 0).granted


def test_a_record_that_answers_after_its_snapshot_ends_the_grant() -> None:
    budget = GrantBudget(100)
    budget.answer(request("a", 100, incarnation=7), 0)
    budget.release_answering([WorkerRecord("a", 7, 0, 3, answering=True, loading=True)])
    assert budget.outstanding_bytes == 100
    budget.release_answering([WorkerRecord("a", 7, 2, 3, answering=True)])
    assert budget.outstanding_bytes == 0


def test_a_grant_ends_after_its_time() -> None:
    budget = GrantBudget(100)
    budget.answer(request("a", 100), 0)
    assert not budget.answer(request("b", 100), GRANT_S - 0.1).granted
    assert budget.answer(request("b", 100), GRANT_S).granted


def test_a_worker_that_asks_for_ever_does_not_keep_the_others_waiting() -> None:
    budget = GrantBudget(100)
    assert budget.answer(request("greedy", 1 << 40), 0).granted and budget.outstanding_bytes == 100
    waits = 0
    for second in range(1, 60):
        assert budget.answer(request("greedy", 1 << 40, incarnation=second), second).granted is (
            second < GRANT_S or waits < 0
        )
        if budget.answer(request("b", 50), second).granted:
            break
        waits += 1
    assert waits <= GRANT_S


def test_asking_again_does_not_count_twice() -> None:
    budget = GrantBudget(100)
    budget.answer(request("a", 60), 0)
    assert budget.answer(request("a", 80, incarnation=2), 1).granted
    assert budget.outstanding_bytes == 80


def test_asking_again_for_the_same_snapshot_is_granted_again() -> None:
    budget = GrantBudget(100)
    budget.answer(request("a", 60), 0)
    budget.answer(request("b", 40), 0)
    assert budget.answer(request("a", 60), 1).granted
    assert budget.outstanding_bytes == 100


def test_grants_of_forgotten_workers_do_not_count() -> None:
    budget = GrantBudget(100)
    budget.answer(request("a", 100), 0)
    budget.forget(lambda worker_id: worker_id == "a")
    assert budget.outstanding_bytes == 0
