"""Events whose parent is not known yet."""

from kvatlas_publishers.ledger.engine_hashes.awaiting_parent import AwaitingParent
from tests.publishers.ledger.one_chain import fold, held, ledger, store


def test_events_awaiting_a_parent_are_kept_once_with_all_their_branches() -> None:
    kept = AwaitingParent()
    for event in [
        store([2, 3], 1, 1),
        store([2, 3, 4], 1, 1),
        store([2, 5], 1, 1),
        store([2], 1, 1),
        store([3, 4], 2, 2),
    ]:
        kept.keep(event)
    assert [(event.parent, event.hashes) for event in kept] == [(1, [2, 3]), (3, [4]), (2, [5])]
    one = ledger()
    fold(one, store([2, 3], 1, 1), store([2, 5], 1, 1), store([2, 3, 4], 1, 1), store([1]))
    assert held(one) == {("hbm", name) for name in (1, 2, 3, 4, 5)}
    kept.take(1)
    kept.keep(store([2], 1, 1))
    assert [event.hashes for event in kept] == [[4], [5], [2]]


def test_events_awaiting_parents_are_bounded_and_never_resolved_in_another_scope() -> None:
    kept = AwaitingParent(max_tokens=6)
    for child in (11, 12, 13, 14):
        kept.keep(store([child], child - 10, 1))
    assert [event.hashes for event in kept] == [[12], [13], [14]]
    assert [event.hashes for event in kept.take(2)] == [[12]] and not kept.take(1)
    one = ledger()
    fold(one, store([2], 1, 1, adapter="lora"))
    fold(one, store([1]))
    assert held(one) == {("hbm", 1)}
    assert fold(one, store([1], adapter="lora")) != [] and one.announced_blocks == 3
