"""Stretches compared with a reference that knows only single blocks: engines with long chains in the device tier and hardly
anything else, and stretches so short that they are joined and cut all the time."""

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from kvatlas_publishers.ledger import lineage
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.naive_ledger import FoldedIndex, NaiveLedger
from tests.publishers.ledger.test_ledger_against_naive import BLOCK_SIZE, check, engine_hash

paths = st.lists(st.sampled_from([0, 0, 0, 0, 0, 1]), min_size=1, max_size=9).map(tuple)
tiers = st.sampled_from([Tier.HBM] * 24 + [Tier.CPU_DRAM])
FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def short_stretches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lineage, "LONG_STRETCH", 5)
        patch.setattr(lineage, "SHORT_STRETCH", 3)
        yield


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[EngineHash], tuple[int, ...]]:
    path, variant = draw(paths), draw(st.sampled_from([0] * 30 + [1]))
    return [engine_hash((None, None), path[: i + 1], variant) for i in range(len(path))], path


@st.composite
def stores(draw: st.DrawFn) -> list[EngineEvent]:
    names, path = draw(chains())
    first = draw(st.sampled_from([0, 0, len(path) // 2, len(path) - 1]))
    tokens = [token for digit in path[first:] for token in (digit, 7)]
    return [EngineStored(names[first:], names[first - 1] if first else None, tokens, BLOCK_SIZE, draw(tiers))]


@st.composite
def removals(draw: st.DrawFn) -> list[EngineEvent]:
    names, _ = draw(chains())
    some = draw(st.sampled_from([names, names[::-1], names[-3:], names[-3:][::-1], names[:1], names[1::2]]))
    tier = draw(tiers)
    events: list[EngineEvent] = [EngineRemoved(some, tier)]
    return [EngineRemoved([name], tier) for name in some] if draw(st.booleans()) else events


cleared: list[EngineEvent] = [EngineCleared()]
event_lists: st.SearchStrategy[list[EngineEvent]] = st.integers(0, 29).flatmap(
    lambda n: st.just(cleared) if n == 0 else removals() if n < 14 else stores()
)
histories = st.lists(
    st.lists(event_lists, min_size=1, max_size=4).map(lambda some: EngineBatch(list(chain.from_iterable(some)))),
    min_size=1,
    max_size=20,
)


@FEW
@given(histories, st.sampled_from([1, 1, 2, 3]), st.integers(0, 25))
def test_exactly_the_usable_residency_is_announced(
    history: list[EngineBatch], granularity: int, reload_at: int
) -> None:
    check(history, granularity, reload_at)


@FEW
@given(histories, st.integers(0, 4))
def test_forgetting_only_under_reports_and_leaves_nothing_behind(history: list[EngineBatch], remembered: int) -> None:
    ledger = Ledger(LedgerSettings("m", "t", block_size=BLOCK_SIZE), remembered_evictions=remembered)
    naive, index = NaiveLedger(BLOCK_SIZE), FoldedIndex()
    for batch in history:
        index.fold(ledger.fold(batch))
        naive.fold(batch)
        usable = naive.usable()
        assert all(key in usable and held <= usable[key] for key, held in index.held.items())
        assert set(ledger.resident()) == naive.resident()
        assert len(ledger.lineage.evicted) <= remembered
    ledger.fold(EngineBatch([EngineCleared(tuple(Tier))]))
    assert len(ledger.lineage.known) <= remembered and not ledger.announced_blocks and not ledger.orphans
    if not remembered:
        assert not ledger.lineage.namespaces and not ledger.lineage.counts
