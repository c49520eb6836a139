"""The ledger compared with a reference that computes everything from scratch, over random engines."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from tests.publishers.ledger.naive_ledger import FoldedIndex, NaiveLedger

BLOCK_SIZE = 2

# A small world, so that chains meet. A path has a digit for each block.
paths = st.tuples(st.integers(1, 5), st.sampled_from([0, 0, 0, 0, 1, 2, 4])).map(
    lambda drawn: tuple(drawn[1] >> i & 1 for i in range(drawn[0]))
)
names = st.sampled_from([(None, None)] * 4 + [(None, "salt"), ("lora", None)])
tiers = st.sampled_from([Tier.HBM, Tier.HBM, Tier.CPU_DRAM])


GroupOf = tuple[int, AttentionKind | None, int | None]
"""Index, kind, window."""
OLD_ENGINE: list[GroupOf] = [(0, None, None)]
FULL: GroupOf = (0, AttentionKind.FULL, None)
MODELS: dict[str, list[GroupOf]] = {
    "window": [FULL, FULL, (1, AttentionKind.SLIDING_WINDOW, 3 * BLOCK_SIZE)],
    "mamba first": [(0, AttentionKind.MAMBA, None), (1, AttentionKind.FULL, None), (1, AttentionKind.FULL, None)],
    "chunked": [FULL, (2, AttentionKind.CHUNKED_LOCAL, None)],
    "two full, window, mamba": [
        FULL,
        (1, AttentionKind.FULL, None),
        (2, AttentionKind.SLIDING_WINDOW, 2 * BLOCK_SIZE),
        (3, AttentionKind.MAMBA, None),
    ],
}


def engine_hash(space: tuple[str | None, str | None], path: tuple[int, ...], variant: int) -> EngineHash:
    """Bytes for some spaces and integers for others; the engine hashes `variant`, but leaves it out of its events."""
    text = repr((space, path, variant)).encode()
    return hash(text) if variant else text


@st.composite
def stores(draw: st.DrawFn, groups: st.SearchStrategy[GroupOf]) -> EngineStored:
    space, path, variant = draw(names), draw(paths), draw(st.sampled_from([0] * 6 + [1]))
    first = draw(st.integers(0, len(path) - 1))
    hashes = [engine_hash(space, path[: i + 1], variant) for i in range(len(path))]
    group, kind, window = draw(groups)
    placeholder = draw(st.integers(0, 9)) == 0
    if placeholder:
        kind = window = None
    return EngineStored(
        hashes=hashes[first:],
        parent=hashes[first - 1] if first else None,
        token_ids=[] if placeholder else [token for digit in path[first:] for token in (digit, 7)],
        block_size=0 if placeholder else BLOCK_SIZE,
        tier=draw(tiers),
        group=group,
        adapter=space[0],
        salt=space[1] if first == 0 else None,
        kind=kind,
        window_tokens=window,
    )


@st.composite
def removals(draw: st.DrawFn, groups: st.SearchStrategy[GroupOf]) -> EngineRemoved:
    space, path, variant = draw(names), draw(paths), draw(st.sampled_from([0] * 6 + [1]))
    first = draw(st.integers(max(0, len(path) - 2), len(path) - 1))
    hashes = [engine_hash(space, path[: i + 1], variant) for i in range(first, len(path))]
    return EngineRemoved(hashes, draw(tiers), draw(groups)[0])


def batches(groups: list[GroupOf]) -> st.SearchStrategy[list[EngineBatch]]:
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
    settings = LedgerSettings("m", "t", block_size=BLOCK_SIZE, granularity=granularity, chunk_tokens=2 * BLOCK_SIZE)
    ledger = make(settings, **options)
    naive, index = NaiveLedger(BLOCK_SIZE, granularity), FoldedIndex(granularity)
    for i, batch in enumerate(history):
        if i == reload_at:
            ledger = Ledger.load(ledger.dump(), ledger.settings)
        events = ledger.fold(batch)
        naive.fold(batch)
        if ledger.take_regrouped():
            index = snapshot_of(ledger, granularity, index)
        else:
            index.fold(events)
        assert index.held == naive.usable()
        if granularity == 1:
            assert index.marks == naive.marks()
            index.check_heads()
            assert ledger.digest_words[15:] == (mark_digest(index).words if ledger.dropped is not None else [])
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
    snapshot = snapshot_of(ledger, granularity, index)
    assert (snapshot.held, snapshot.marks, snapshot.heads) == (index.held, index.marks, index.heads)


def snapshot_of(ledger: Ledger, granularity: int, index: FoldedIndex) -> FoldedIndex:
    """The index after a snapshot, with the places of the blocks of `index`."""
    snapshot = FoldedIndex(granularity, before=index.before, index_of=index.index_of)
    for chunk in ledger.snapshot():
        snapshot.chunk(chunk)
    for event in ledger.mark_snapshot():
        snapshot.take_marks(event)
    return snapshot


def mark_digest(index: FoldedIndex) -> MarkDigest:
    digest = MarkDigest()
    for scope_id, block in index.marks:
        digest.add_marks(scope_id, block)
    for (scope_id, block), bits in index.heads.items():
        digest.add_head(scope_id, block, bits)
    return digest


FEW = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


A, B, C, R = (engine_hash((None, None), path, 0) for path in ((0, 0), (0, 0, 0), (0, 0, 1), (0,)))
BRANCHES_BEFORE_THEIR_ROOT = [
    EngineBatch([EngineStored([A, B], R, [0, 7, 0, 7], BLOCK_SIZE)]),
    EngineBatch([EngineStored([A, C], R, [0, 7, 1, 7], BLOCK_SIZE), EngineStored([R], None, [0, 7], BLOCK_SIZE)]),
]


@FEW
@given(batches(OLD_ENGINE), st.sampled_from([1, 1, 2, 3]), st.integers(0, 30))
@example(BRANCHES_BEFORE_THEIR_ROOT, 1, 1)
def test_exactly_the_usable_residency_is_announced(
    history: list[EngineBatch], granularity: int, reload_at: int
) -> None:
    check(history, granularity, reload_at)


@FEW
@given(
    st.sampled_from(sorted(MODELS)).flatmap(lambda name: batches(MODELS[name])),
    st.sampled_from([1, 1, 1, 2]),
    st.integers(0, 30),
)
def test_a_hybrids_blocks_count_if_full_attention_holds_them_and_marks_are_where_all_groups_resume(
    history: list[EngineBatch], granularity: int, reload_at: int
) -> None:
    check(history, granularity, reload_at)


@FEW
@given(batches(OLD_ENGINE), st.integers(0, 3))
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
@given(batches(OLD_ENGINE))
def test_nothing_is_left_when_everything_is_removed_and_forgotten(history: list[EngineBatch]) -> None:
    ledger = Ledger(LedgerSettings("m", "t", block_size=BLOCK_SIZE), remembered_evictions=0)
    index = FoldedIndex()
    for batch in [*history, EngineBatch([EngineCleared(tuple(Tier))])]:
        index.fold(ledger.fold(batch))
    assert not index.held and not ledger.announced_blocks and not ledger.orphans
    assert not ledger.lineage.known and not ledger.lineage.namespaces
