"""The ledger against a reference that computes everything from scratch, over random engines."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.events import EngineBatch, EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored
from publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.naive_ledger import FoldedIndex, NaiveLedger

BLOCK_SIZE = 2

# A small world, so that chains meet: blocks of a path are index apart by one digit each.
paths = st.tuples(st.integers(1, 5), st.sampled_from([0, 0, 0, 0, 1, 2, 4])).map(
    lambda drawn: tuple(drawn[1] >> i & 1 for i in range(drawn[0]))
)
names = st.sampled_from([(None, None)] * 4 + [(None, "salt"), ("lora", None)])
tiers = st.sampled_from([Tier.HBM, Tier.HBM, Tier.CPU_DRAM])


def engine_hash(space: tuple[str | None, str | None], path: tuple[int, ...], variant: int) -> EngineHash:
    """Bytes for some and integers for others; `variant` is hashed by the engine and left out of its events."""
    text = repr((space, path, variant)).encode()
    return hash(text) if variant else text


@st.composite
def stores(draw: st.DrawFn, groups: st.SearchStrategy[tuple[int, bool]]) -> EngineStored:
    space, path, variant = draw(names), draw(paths), draw(st.sampled_from([0] * 6 + [1]))
    first = draw(st.integers(0, len(path) - 1))
    hashes = [engine_hash(space, path[: i + 1], variant) for i in range(len(path))]
    group, indexable = draw(groups)
    placeholder = draw(st.integers(0, 9)) == 0
    return EngineStored(
        hashes=hashes[first:],
        parent=hashes[first - 1] if first else None,
        token_ids=[] if placeholder else [token for digit in path[first:] for token in (digit, 7)],
        block_size=0 if placeholder else BLOCK_SIZE,
        tier=draw(tiers),
        group=group,
        adapter=space[0],
        salt=space[1] if first == 0 else None,
        indexable=indexable,
    )


@st.composite
def removals(draw: st.DrawFn, groups: st.SearchStrategy[tuple[int, bool]]) -> EngineRemoved:
    space, path, variant = draw(names), draw(paths), draw(st.sampled_from([0] * 6 + [1]))
    first = draw(st.integers(max(0, len(path) - 2), len(path) - 1))
    hashes = [engine_hash(space, path[: i + 1], variant) for i in range(first, len(path))]
    return EngineRemoved(hashes, draw(tiers), draw(groups)[0])


def batches(groups: list[tuple[int, bool]]) -> st.SearchStrategy[list[EngineBatch]]:
    group = st.sampled_from(groups)
    cleared = st.sampled_from([EngineCleared(), EngineCleared(tuple(Tier)), EngineCleared((Tier.CPU_DRAM,))])
    event: st.SearchStrategy[EngineEvent] = st.integers(0, 19).flatmap(
        lambda n: cleared if n == 0 else removals(group) if n < 9 else stores(group)
    )
    return st.lists(st.lists(event, min_size=1, max_size=5).map(EngineBatch), min_size=1, max_size=25)


def check(
    history: list[EngineBatch],
    granularity: int,
    reload_at: int,
    make: Callable[..., Ledger] = Ledger,
    **options: Any,
) -> None:
    ledger = make(LedgerSettings("m", "t", block_size=BLOCK_SIZE, granularity=granularity), **options)
    naive, index = NaiveLedger(BLOCK_SIZE, granularity), FoldedIndex(granularity)
    for i, batch in enumerate(history):
        if i == reload_at:
            ledger = Ledger.load(ledger.dump(), ledger.settings)
        events = ledger.fold(batch)
        naive.fold(batch)
        index.fold(events)
        assert index.held == naive.usable()
        assert set(ledger.resident()) == naive.resident()
        digest = Digest()
        for (scope_id, sequence_hash), held in index.held.items():
            for tier in held:
                digest.add(scope_id, tier, sequence_hash)
        assert ledger.digest == digest
        assert ledger.announced_blocks == len(index.held)
        assert {scope for scope, _ in index.held} <= ledger.uses.keys()
        announced: dict[tuple[bytes, bytes], set[Tier]] = {}
        for scope, tier, _, value in ledger.announced():
            announced.setdefault((scope, value.to_bytes(8, "little")), set()).add(tier)
        assert announced == index.held
    snapshot = FoldedIndex(granularity, before=index.before, index_of=index.index_of)
    for chunk in ledger.snapshot():
        snapshot.chunk(chunk)
    assert snapshot.held == index.held


FEW = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


A, B, C, R = (engine_hash((None, None), path, 0) for path in ((0, 0), (0, 0, 0), (0, 0, 1), (0,)))
BRANCHES_BEFORE_THEIR_ROOT = [
    EngineBatch([EngineStored([A, B], R, [0, 7, 0, 7], BLOCK_SIZE)]),
    EngineBatch([EngineStored([A, C], R, [0, 7, 1, 7], BLOCK_SIZE), EngineStored([R], None, [0, 7], BLOCK_SIZE)]),
]


@FEW
@given(batches([(0, True)]), st.sampled_from([1, 1, 2, 3]), st.integers(0, 30))
@example(BRANCHES_BEFORE_THEIR_ROOT, 1, 1)
def test_exactly_the_usable_residency_is_announced(
    history: list[EngineBatch], granularity: int, reload_at: int
) -> None:
    check(history, granularity, reload_at)


@FEW
@given(batches([(0, True), (1, True), (2, False)]), st.integers(1, 2), st.integers(0, 30))
def test_a_block_of_a_hybrid_counts_when_every_full_attention_group_holds_it(
    history: list[EngineBatch], granularity: int, reload_at: int
) -> None:
    check(history, granularity, reload_at)


@FEW
@given(batches([(0, True)]), st.integers(0, 3))
def test_forgetting_lineages_only_under_reports(history: list[EngineBatch], remembered: int) -> None:
    ledger = Ledger(LedgerSettings("m", "t", block_size=BLOCK_SIZE), remembered_evictions=remembered)
    naive, index = NaiveLedger(BLOCK_SIZE), FoldedIndex()
    for batch in history:
        index.fold(ledger.fold(batch))
        naive.fold(batch)
        usable = naive.usable()
        assert all(key in usable and tiers <= usable[key] for key, tiers in index.held.items())
        assert set(ledger.resident()) == naive.resident()
        assert len(ledger.lineage.evicted) <= remembered
        held = {name for _, _, name in ledger.resident()}
        assert len(ledger.lineage.known) <= len(held) + remembered


@FEW
@given(batches([(0, True)]))
def test_nothing_is_left_when_everything_is_removed_and_forgotten(history: list[EngineBatch]) -> None:
    ledger = Ledger(LedgerSettings("m", "t", block_size=BLOCK_SIZE), remembered_evictions=0)
    index = FoldedIndex()
    for batch in [*history, EngineBatch([EngineCleared(tuple(Tier))])]:
        index.fold(ledger.fold(batch))
    assert not index.held and not ledger.announced_blocks and not ledger.orphans
    assert not ledger.lineage.known and not ledger.lineage.namespaces
