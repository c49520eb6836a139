"""Several engine hashes for one block: a child is found only after the hash that it names as its parent."""

from kvatlas.events import Removed, Stored
from kvatlas_publishers.engine_events import EngineRemoved
from kvatlas_publishers.ledger.ledger import Ledger
from tests.publishers.ledger.one_chain import fold, hashes, held, ledger, store


def test_a_child_goes_with_the_variant_of_its_parent_that_it_hangs_on() -> None:
    one = ledger()
    fold(one, store([1, 2]), store([3], 2, 2))
    assert fold(one, store([22], 1, 1)) == []  # another hash of the block of 2
    (gone,) = fold(one, EngineRemoved([2]))
    assert isinstance(gone, Removed) and gone.hashes == hashes(2, 3)
    assert held(one) == {("hbm", 1), ("hbm", 22)}
    (back,) = fold(one, store([2], 1, 1))
    assert isinstance(back, Stored) and back.hashes == hashes(2, 3)


def test_a_child_of_the_variant_that_stays_stays() -> None:
    one = ledger()
    fold(one, store([1, 2]), store([22], 1, 1), store([3], 22, 2))
    assert fold(one, EngineRemoved([2])) == []
    assert held(one) == {("hbm", 1), ("hbm", 22), ("hbm", 3)}
    assert fold(one, EngineRemoved([3, 22, 1])) and not one.announced_blocks


def test_what_is_behind_the_child_goes_with_it_and_what_comes_later_waits() -> None:
    one = ledger()
    fold(one, store([1, 2, 3, 4]), store([22], 1, 1))
    (gone,) = fold(one, EngineRemoved([2]))
    assert isinstance(gone, Removed) and {hashes(2, 4)[at : at + 8] for at in (0, 8)} == {
        gone.hashes[:8],
        gone.hashes[8:],
    }
    assert fold(one, store([5], 4, 4)) == []
    (back,) = fold(one, store([2], 1, 1))
    assert isinstance(back, Stored) and back.hashes == hashes(2, 5)


def test_a_saved_ledger_knows_what_hangs_on_which_variant() -> None:
    one = ledger()
    fold(one, store([1, 2, 3]), store([22], 1, 1), EngineRemoved([2]))
    one = Ledger.load(one.dump(), one.settings)
    assert held(one) == {("hbm", 1), ("hbm", 22)}
    fold(one, store([2], 1, 1))
    again = Ledger.load(one.dump(), one.settings)
    assert held(again) == {("hbm", 1), ("hbm", 2), ("hbm", 22), ("hbm", 3)}
    fold(again, EngineRemoved([2]))
    assert held(again) == {("hbm", 1), ("hbm", 22)}


def test_hashes_of_forgotten_variants_are_forgotten() -> None:
    one = Ledger(ledger().settings, remembered_evictions=0)
    fold(one, store([1, 2, 3]), store([22], 1, 1), EngineRemoved([2]))
    fold(one, EngineRemoved([3, 22, 1]))
    variants = one.lineage.variants
    assert not one.announced_blocks and not one.lineage.known and not one.lineage.namespaces
    assert not variants.names and not variants.parent_of and not variants.children_of and not variants.detached


def test_a_child_told_before_its_parent_hangs_on_the_hash_that_it_waited_for() -> None:
    one = ledger()
    fold(one, store([1, 22], None, 0), store([3], 2, 2))  # 2 is another hash of the block of 22, reported last
    fold(one, store([2], 1, 1))
    assert ("hbm", 3) in held(one)
    fold(one, EngineRemoved([2]))
    assert held(one) == {("hbm", 1), ("hbm", 22)}


def test_a_detached_child_that_is_stored_again_brings_back_what_is_behind_it() -> None:
    one = ledger()
    fold(one, store([1]), store([11, 22]), store([2, 3], 1, 1))  # 11 and 22 are other hashes of the blocks of 1 and 2
    fold(one, EngineRemoved([1]))
    assert held(one) == {("hbm", 11), ("hbm", 22)}
    fold(one, store([1, 2]))
    assert ("hbm", 3) in held(one)


def test_a_saved_ledger_knows_it_whatever_the_order_of_its_hashes() -> None:
    one = ledger()
    fold(one, store([1, 2, 3]), store([22], 11, 1), store([11]))  # 11 and 22 are other hashes of the blocks of 1 and 2
    fold(one, EngineRemoved([1, 2]))
    assert held(one) == {("hbm", 11), ("hbm", 22)}
    again = Ledger.load(one.dump(), one.settings)
    assert held(again) == held(one) and again.lineage.variants.parent_of == one.lineage.variants.parent_of


def test_what_hung_on_a_forgotten_hash_is_not_found_behind_another_hash_of_its_block() -> None:
    one = Ledger(ledger().settings, remembered_evictions=0)
    fold(one, store([1, 2, 3]), EngineRemoved([2]), store([11]))  # 2 is forgotten, 3 is still held after it
    fold(one, store([22], 11, 1))  # 22 is another hash of the block of 2
    assert held(one) == {("hbm", 1), ("hbm", 11), ("hbm", 22)}
    assert 3 not in one.lineage.known


def test_what_hung_on_a_detached_hash_is_forgotten_with_it() -> None:
    one = Ledger(ledger().settings, remembered_evictions=0)
    fold(one, store([11]), store([1, 2, 3]), EngineRemoved([1]))
    fold(one, store([22], 11, 1))
    assert held(one) == {("hbm", 11), ("hbm", 22)}
