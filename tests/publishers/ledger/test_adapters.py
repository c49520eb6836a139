"""Adapters that the engine reports only by its own id."""

from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineRemoved
from tests.publishers.ledger.one_chain import fold, held, ledger, store


def test_an_adapter_that_the_engine_does_not_name_is_left_out() -> None:
    one = ledger()
    fold(one, store([1, 2]), store([11, 12], adapter="1", adapter_named=False))
    assert held(one) == {("hbm", 1), ("hbm", 2)} and one.counters.adapter_unnamed == 2
    fold(one, EngineRemoved([12, 11]))
    assert one.announced_blocks == 2


def test_or_it_has_the_name_that_the_settings_give_its_id() -> None:
    one = ledger(adapter_ids={"1": "sql"})
    fold(one, store([11, 12], adapter="1", adapter_named=False), store([21], adapter="2", adapter_named=False))
    assert {scope for scope, *_ in one.announced()} == {Scope("m", "t", "sql").scope_id}
    assert one.announced_blocks == 2 and one.counters.adapter_unnamed == 1
